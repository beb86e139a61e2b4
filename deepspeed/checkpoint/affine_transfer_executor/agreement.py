# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""All processes agree on what is about to happen, or all of them refuse it with the same words."""

import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from deepspeed.checkpoint.affine_transfer_executor.channel import Channel, WaitFailed
from deepspeed.checkpoint.affine_transfer_executor.digest import PROTOCOL_VERSION
from deepspeed.checkpoint.affine_transfer_executor.errors import (AffineTransferExecutionError, Explained,
                                                                  TransferBrokenError, described)

# The size of a row never changes, in any version: a gloo receive of another size aborts the process.
ROW = 32
VERSION, REFUSED, DOING, FIRST_TERM, FIRST_FACT = 0, 1, 2, 3, 24
REASON_BYTES = 1024
NAMED = 4
# What processes can agree about. The order is part of the protocol.
DOINGS = ('compile a transfer', 'run a transfer', 'check what arrived', 'switch to what arrived')
COMPILE, RUN, VERIFY, SWITCH = DOINGS
# What it means that the group breaks before all have agreed.
BROKE_BEFORE = 'the transfer broke before it began and no target has changed'
REFUSED_BEFORE = 'the transfer was refused before it began and no target has changed'


@dataclass(frozen=True)
class Position:
    """What one process brings to an agreement.

    Attributes:
        doing: one of DOINGS.
        terms: name of what must agree -> 16 bytes that stand for it; None where this process cannot go on.
        reasons: then, why it cannot.
        facts: up to eight integers for the others to know.
        if_refused, if_broken: what it means for the transfer and for the targets of this process, if the processes
            do not agree, or if not all of them come.
    """
    doing: str
    terms: Optional[Mapping] = None
    reasons: Sequence[str] = ()
    facts: Tuple[int, ...] = ()
    if_refused: str = REFUSED_BEFORE
    if_broken: str = BROKE_BEFORE


@contextmanager
def attempting(channel: Channel) -> Iterator[List[str]]:
    """Do what is inside, and go on to the agreement however it fails: the others wait there, and must hear that this
    process cannot take part. Gives the reasons: none, or what was raised."""
    reasons: List[str] = []
    with channel.ending(BROKE_BEFORE):
        try:
            yield reasons
        except Exception as error:
            reasons.append(described(error))


def agree(channel: Channel, position: Position, timeout: float) -> List[Tuple[int, ...]]:
    """Exchange what is about to happen; nothing happens unless all agree.

    Args:
        channel: the group.
        position: of this process.
        timeout: seconds to wait for the others.

    Returns:
        The eight facts of every process, by process; zeros where it has fewer.

    Raises:
        AffineTransferExecutionError: on every process in the same words, if any refuses or differs.
        TransferBrokenError: on those that came, if some do not come in time or a connection is lost; the group has
            ended.
    """
    # Made before the first exchange: whoever takes part in it must be able to take part in the second.
    row, text = _row(position), _encoded('; '.join(position.reasons))
    with channel.ending(position.if_broken):
        rows, texts = _exchange(channel, position.doing, row, text, timeout)
        objection = _objection(position, rows, texts)
    if objection:
        raise AffineTransferExecutionError(objection)
    return [tuple(row[FIRST_FACT:].tolist()) for row in rows]


def _exchange(channel: Channel, doing: str, row: torch.Tensor, text: torch.Tensor,
              timeout: float) -> Tuple[List[torch.Tensor], List[torch.Tensor]]:
    """Everybody's rows, and the reasons if anybody refuses."""
    channel.board.arrive()
    began = time.monotonic()
    try:
        rows = channel.gather(row, timeout)
        # Reasons are long and rare: a second exchange, in which all take part as all know of it.
        return rows, channel.gather(text, timeout) if _refused(rows) else []
    except WaitFailed as failure:
        raise Explained(_nobody_came(channel, doing, failure, timeout, time.monotonic() - began)) from failure


def _objection(position: Position, rows: Sequence[torch.Tensor], texts: Sequence[torch.Tensor]) -> str:
    """Why the transfer is refused, on every process in the same words, or nothing."""
    refused = _refused(rows)
    if refused:
        return f'{position.if_refused}: ' + '; '.join(_refusals(refused, texts))
    differences = _differences(rows, position.terms)
    if differences:
        return (f'processes do not have the same transfer schedule; {position.if_refused}: ' + '; '.join(differences))
    return ''


def _refused(rows: Sequence[torch.Tensor]) -> List[int]:
    return [rank for rank, row in enumerate(rows) if row[REFUSED]]


def _row(position: Position) -> torch.Tensor:
    # Also where the program has another default device.
    row = torch.zeros(ROW, dtype=torch.int64, device='cpu')
    row[VERSION] = PROTOCOL_VERSION
    row[REFUSED] = position.terms is None
    row[DOING] = DOINGS.index(position.doing)
    for index, term in enumerate((position.terms or {}).values()):
        halves = (term[:8], term[8:])
        place = FIRST_TERM + 2 * index
        row[place:place + 2] = torch.tensor([int.from_bytes(half, 'little', signed=True) for half in halves],
                                            device='cpu')
    row[FIRST_FACT:FIRST_FACT + len(position.facts)] = torch.tensor(position.facts, dtype=torch.int64, device='cpu')
    return row


def _encoded(reason: str) -> torch.Tensor:
    data = reason.encode(errors='backslashreplace')[:REASON_BYTES].ljust(REASON_BYTES, b'\0')
    return torch.tensor(list(data), dtype=torch.uint8, device='cpu')


def _refusals(refused: Sequence[int], texts: Sequence[torch.Tensor]) -> List[str]:
    lines = []
    for rank in refused[:NAMED]:
        reason = bytes(texts[rank].tolist()).rstrip(b'\0').decode(errors='ignore')
        lines.append(f'process {rank} rejected the transfer batch: {reason}')
    if len(refused) > NAMED:
        lines.append(f'{len(refused) - NAMED} more processes rejected it too')
    return lines


def _differences(rows: Sequence[torch.Tensor], terms: Mapping) -> List[str]:
    lines = _camps('versions of this library\'s protocol', [(int(row[VERSION]), ) for row in rows])
    doings = [int(row[DOING]) for row in rows]
    if len(set(doings)) > 1:
        acts = [f'process {rank} is to {DOINGS[doing]}' for rank, doing in enumerate(doings) if doing < len(DOINGS)]
        return lines + [', '.join(acts[:NAMED])]
    for index, name in enumerate(terms):
        place = FIRST_TERM + 2 * index
        lines += _camps(name, [tuple(row[place:place + 2].tolist()) for row in rows])
    return lines


def _camps(name: str, values: Sequence[Tuple[int, ...]]) -> List[str]:
    camps: Dict[Tuple[int, ...], List[int]] = {}
    for rank, value in enumerate(values):
        camps.setdefault(value, []).append(rank)
    if len(camps) == 1:
        return []
    shown = [named(ranks) for ranks in sorted(camps.values(), key=lambda ranks: (-len(ranks), ranks))]
    return [f'their {name} differ ({" against ".join(shown[:NAMED])})']


def numbers(ranks: Sequence[int]) -> str:
    """Processes for a message, by number alone: ``1, 2``."""
    return ', '.join(str(rank) for rank in ranks[:8]) + (', ...' if len(ranks) > 8 else '')


def named(ranks: Sequence[int]) -> str:
    """Processes for a message: ``process 1``, or ``processes 1, 2``."""
    return f'process {numbers(ranks)}' if len(ranks) == 1 else f'processes {numbers(ranks)}'


def refuse_broken(channel: Channel) -> None:
    """Raise TransferBrokenError if the group has broken before."""
    broken = channel.board.broken()
    if broken is not None:
        raise TransferBrokenError('this group cannot be used any more, so the transfer was refused before it '
                                  f'began: {broken}. Join a new group')


def _nobody_came(channel: Channel, doing: str, failure: WaitFailed, timeout: float, waited: float) -> str:
    missing = channel.board.missing(channel.size)
    # gloo's clock is coarser than ours.
    lost = waited < 0.99 * timeout
    began = doing in (COMPILE, RUN)
    if missing and lost:
        late = 'had not begun the transfer' if began else f'had not come to {doing}'
        return f'lost a connection after {waited:.1f} seconds, while {named(missing)} {late} ({failure})'
    if missing:
        late = 'begin the transfer' if began else doing
        return f'waited {timeout:g} seconds for {named(missing)} to {late}, in vain ({failure})'
    return f'could not exchange the transfer schedule with {named(failure.pending.peers)} ({failure})'
