# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Compare what sources hold with what targets got, parameter by parameter on every link."""

import time
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch

from deepspeed.checkpoint.affine_transfer_executor.channel import Channel
from deepspeed.checkpoint.affine_transfer_executor.checksums import Checksums
from deepspeed.checkpoint.affine_transfer_executor.copies import Buffers, Copies, pack, pack_target, parts_of
from deepspeed.checkpoint.affine_transfer_executor.links import Message, messages_of
from deepspeed.checkpoint.affine_transfer_executor.moves import Moves

Run = Tuple[int, int, int]


@dataclass(frozen=True)
class Reading:
    """One message read once more, from one of its ends.

    Attributes:
        copies: fill ``data`` from the end of this process.
        take: makes the checksums, for all readings of the process.
        runs: ``(start, stop, width)`` of each parameter's bytes. names: of those parameters.
    """
    copies: Copies
    take: Checksums
    data: torch.Tensor
    runs: Tuple[Run, ...]
    names: Tuple[str, ...]

    def checksums(self) -> torch.Tensor:
        """int64, one for each run."""
        self.copies.run()
        return self.take.of(self.data, self.runs)


@dataclass(frozen=True)
class Exchange:
    """Checksums that travel at one time: by peer, the readings that they are of."""
    sends: Tuple[Tuple[int, Tuple[Reading, ...]], ...]
    receives: Tuple[Tuple[int, Tuple[Reading, ...]], ...]


@dataclass(frozen=True)
class Verification:
    """All that one process compares.

    Attributes:
        exchanges: with other processes.
        locals_: pairs of readings of both ends of local copies.
        staging_bytes: of the memory that is read into.
    """
    exchanges: Tuple[Exchange, ...]
    locals_: Tuple[Tuple[Reading, Reading], ...]
    staging_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes of the checksums that this process sends."""
        return 8 * sum(
            len(reading.runs) for exchange in self.exchanges for _, readings in exchange.sends for reading in readings)


def prepare_verification(rounds: Sequence, moves: Moves, buffers: Buffers, rank: int, message_bytes: int,
                         device: torch.device) -> Verification:
    """What there is to compare after a transfer.

    Args:
        rounds: of this process, in order.
        moves, buffers, device: as for ``bind``. rank: this process.
        message_bytes: most bytes of a message.
    """
    # Each local move by itself: they do not come in the order of a Link.
    local = messages_of(rank, np.flatnonzero(moves.is_local), moves, 0, message_bytes)
    largest = max([message.numbytes for item in rounds
                   for message in item.sends + item.receives] + [message.numbytes for message in local],
                  default=0)
    # Read one after the other, so one buffer is enough for each end.
    memory = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
    take = Checksums(device)

    def reading(message: Message, from_source: bool) -> Reading:
        return _reading(message, moves, buffers, take, memory[0 if from_source else 1], from_source)

    groups: Dict[Tuple[int, int], Tuple[Dict[int, List[Reading]], Dict[int, List[Reading]]]] = {}
    for item in rounds:
        group = item.key[0], item.key[2]
        for side, messages in enumerate((item.sends, item.receives)):
            for message in messages:
                readings = groups.setdefault(group, ({}, {}))[side]
                readings.setdefault(message.peer, []).append(reading(message, side == 0))
    exchanges = tuple(
        Exchange(*(tuple((peer, tuple(those)) for peer, those in side.items()) for side in groups[group]))
        for group in sorted(groups))
    pairs = tuple((reading(message, True), reading(message, False)) for message in local)
    return Verification(exchanges, pairs, 2 * largest)


def _reading(message: Message, moves: Moves, buffers: Buffers, take: Checksums, memory: torch.Tensor,
             from_source: bool) -> Reading:
    data = memory[:message.numbytes]
    copies = Copies()
    runs: List[Run] = []
    names: List[str] = []
    previous = None
    for part in parts_of(moves, message.rows, message.first, message.last):
        if from_source:
            pack(copies, buffers, part, data)
        else:
            pack_target(copies, buffers, part, data)
        stop = part.start + part.numbytes
        if part.request == previous:
            runs[-1] = runs[-1][0], stop, part.width
        else:
            runs.append((part.start, stop, part.width))
            names.append(buffers.requests[part.request].name)
        previous = part.request
    return Reading(copies, take, data, tuple(runs), tuple(names))


def differences(verification: Verification, channel: Optional[Channel], timeout: float) -> List[str]:
    """Read everything again and compare; what differs, in words.

    Args:
        verification: what to compare.
        channel: the group, or None where all is local.
        timeout: seconds to wait for any process.

    Raises:
        WaitFailed: a process did not send its checksums.
    """
    found = []
    for source, target in verification.locals_:
        found += _compare(source.names, source.checksums(), target.checksums(), 'this process')
    for exchange in verification.exchanges:
        found += _exchange(exchange, channel, timeout)
    return found


def _exchange(exchange: Exchange, channel: Channel, timeout: float) -> List[str]:
    theirs = [(peer,
               torch.empty(sum(len(reading.runs) for reading in readings), dtype=torch.int64, device=channel.device))
              for peer, readings in exchange.receives]
    mine = [(peer, _all_checksums(readings)) for peer, readings in exchange.sends]
    posted = channel.post([(peer, sums.view(torch.uint8)) for peer, sums in theirs],
                          [(peer, sums.view(torch.uint8)) for peer, sums in mine])
    # While they travel, the same is read here.
    here = [_all_checksums(readings) for _, readings in exchange.receives]
    channel.wait(posted, time.monotonic() + timeout)
    found = []
    for (peer, readings), (_, sums), own in zip(exchange.receives, theirs, here):
        names = [name for reading in readings for name in reading.names]
        found += _compare(names, sums, own, f'process {peer}')
    return found


def _all_checksums(readings: Sequence[Reading]) -> torch.Tensor:
    return torch.cat([reading.checksums() for reading in readings])


def _compare(names: Sequence[str], sent: torch.Tensor, got: torch.Tensor, whence: str) -> List[str]:
    wrong = dict.fromkeys(names[index] for index in torch.nonzero(sent != got).flatten().tolist())
    return [f'{name} from {whence} is not what was sent' for name in wrong]
