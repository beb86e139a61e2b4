# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What each process sends to each other one, cut into messages, and the rounds in which those travel.

The round of a message follows from the two processes, the stage and the message's number in its link alone. So both
ends of a link expect the same bytes at the same place of one order that all processes share, whatever else each of
them does, and no process needs to know the links of others.
"""

from dataclasses import dataclass
from typing import Dict, List, Tuple

import numpy as np

from deepspeed.checkpoint.affine_transfer_executor.digest import hash_of
from deepspeed.checkpoint.affine_transfer_executor.moves import Moves

# Stage, number in the link, wave; rounds run in this order.
RoundKey = Tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Link:
    """The moves of one stage from this process to another, or from another to this one.

    Args:
        stage: of all its moves.
        peer: the process at the other end.
        wave: with which of this process's links of this stage it travels.
        rows: int64[S], its moves; those with rows of their own messages first, then by falling width. Both ends list
            them in the same order.
    """
    stage: int
    peer: int
    wave: int
    rows: np.ndarray


@dataclass(frozen=True, eq=False)
class Message:
    """One send or receive.

    Args:
        peer: the other process.
        rows: int64[S], the moves that it carries, one behind the other.
        first, last: int64[S], the elements ``[first, last)`` of each, counted in row-major order.
        numbytes: of all of them.
    """
    peer: int
    rows: np.ndarray
    first: np.ndarray
    last: np.ndarray
    numbytes: int


@dataclass(frozen=True, eq=False)
class Round:
    """What this process posts at one time; ``key`` orders the rounds of all processes."""
    key: RoundKey
    receives: Tuple[Message, ...]
    sends: Tuple[Message, ...]


@dataclass(frozen=True)
class Links:
    """All links of one process; in both lists those come first that are nearest, so that processes meet in pairs."""
    sends: Tuple[Link, ...]
    receives: Tuple[Link, ...]

    @property
    def most_operations(self) -> int:
        """Most sends and receives in one round."""
        count: Dict[Tuple[int, int], int] = {}
        for link in self.sends + self.receives:
            count[link.stage, link.wave] = count.get((link.stage, link.wave), 0) + 1
        return max(count.values(), default=0)


def links_of(moves: Moves, rank: int, size: int, direct_bytes: int, operations: int) -> Links:
    """The links of one process.

    A process sends to those ahead of it and receives from those behind, by their distance. A wave is half as many
    neighbouring distances as there may be operations, so no round has more.

    Args:
        moves: of this process.
        rank: this process, of ``size``.
        direct_bytes: moves of this size or above get messages of their own.
        operations: most sends and receives in a round, at least 2.
    """
    distance = (moves.target_process - moves.source_process) % size
    wave = (distance - 1) // (operations // 2)
    sends = _grouped(moves, (moves.source_process == rank) & (distance > 0), moves.target_process, wave, direct_bytes)
    receives = _grouped(moves, (moves.target_process == rank) & (distance > 0), moves.source_process, wave,
                        direct_bytes)
    sends.sort(key=lambda link: (link.stage, (link.peer - rank) % size))
    receives.sort(key=lambda link: (link.stage, (rank - link.peer) % size))
    return Links(tuple(sends), tuple(receives))


def _grouped(moves: Moves, mine: np.ndarray, peer: np.ndarray, wave: np.ndarray, direct_bytes: int) -> List[Link]:
    rows = np.flatnonzero(mine)
    part = moves.take(rows)
    # Nothing here but what both ends know of a move. A target address is written once, so no two moves are equal.
    order = np.lexsort((part.target_offset, part.target_rank, part.source_offset, part.source_rank, part.request,
                        -part.width, part.numbytes < direct_bytes, peer[rows], part.stage))
    rows = rows[order]
    new = np.flatnonzero(np.diff(moves.stage[rows]) | np.diff(peer[rows])) + 1
    return [
        Link(int(moves.stage[group[0]]), int(peer[group[0]]), int(wave[group[0]]), group)
        for group in np.split(rows, new) if len(group)
    ]


def rounds_of(links: Links, moves: Moves, direct_bytes: int, message_bytes: int) -> Tuple[Round, ...]:
    """The rounds of one process, in order.

    Args:
        links: of this process.
        moves: that their rows are in.
        direct_bytes: as for ``links_of``.
        message_bytes: most bytes of a message, a multiple of all widths.
    """
    receives: Dict[RoundKey, List[Message]] = {}
    sends: Dict[RoundKey, List[Message]] = {}
    for those, table in ((links.receives, receives), (links.sends, sends)):
        for link in those:
            for number, message in enumerate(messages_of(link.peer, link.rows, moves, direct_bytes, message_bytes)):
                table.setdefault((link.stage, number, link.wave), []).append(message)
    return tuple(
        Round(key, tuple(receives.get(key, ())), tuple(sends.get(key, ()))) for key in sorted({*receives, *sends}))


def messages_of(peer: int, rows: np.ndarray, moves: Moves, direct_bytes: int, message_bytes: int) -> List[Message]:
    """Moves as messages: large ones by themselves, then all others as one stream that is cut at every
    ``message_bytes``. Arguments as for ``rounds_of``; ``rows`` in the order of a Link."""
    numel, width = moves.shape[rows].prod(axis=1), moves.width[rows]
    large = int((numel * width >= direct_bytes).sum())
    messages = []
    for row, count, size in zip(rows[:large].tolist(), numel[:large].tolist(), width[:large].tolist()):
        step = _whole_rows(moves.shape[row], message_bytes // size)
        for first in range(0, count, step):
            last = min(first + step, count)
            messages.append(Message(peer, np.array([row]), np.array([first]), np.array([last]), (last - first) * size))
    return messages + _stream(peer, rows[large:], numel[large:], width[large:], message_bytes)


def _whole_rows(shape: np.ndarray, most: int) -> int:
    """At most so many elements, but where possible whole rows, so that each message is one box.

    >>> _whole_rows(np.array([5, 10, 4]), 95), _whole_rows(np.array([5, 10, 4]), 15), _whole_rows(np.array([5]), 3)
    (80, 12, 3)
    """
    rows = np.append(np.cumprod(shape[::-1]), 1)
    row = int(rows[rows <= most].max())
    return most // row * row


def _stream(peer: int, rows: np.ndarray, numel: np.ndarray, width: np.ndarray, message_bytes: int) -> List[Message]:
    stops = np.cumsum(numel * width)
    starts = stops - numel * width
    messages = []
    for low in range(0, int(stops[-1]) if len(stops) else 0, message_bytes):
        high = min(low + message_bytes, int(stops[-1]))
        part = slice(int(np.searchsorted(stops, low, side='right')), int(np.searchsorted(starts, high, side='left')))
        first = np.maximum(low - starts[part], 0) // width[part]
        last = (np.minimum(high, stops[part]) - starts[part]) // width[part]
        messages.append(Message(peer, rows[part], first, last, high - low))
    return messages


def link_hashes(links: Links, moves: Moves, rank: int) -> Tuple[Dict[int, int], Dict[int, int]]:
    """By peer, 62 bits for what is sent to it and for what is received from it; equal where both ends list the same
    moves."""
    sent: Dict[int, int] = {}
    received: Dict[int, int] = {}
    for those, hashes in ((links.sends, sent), (links.receives, received)):
        for link in those:
            ends = (rank, link.peer) if those is links.sends else (link.peer, rank)
            hashes[link.peer] = (hashes.get(link.peer, 0) + _link_hash(link, moves, ends)) % 2**62
    return sent, received


def _link_hash(link: Link, moves: Moves, ends: Tuple[int, int]) -> int:
    part = moves.take(link.rows)
    # How many axes of size 1 come first depends on what else this process moves.
    axes = part.shape.shape[1] - int(np.append((part.shape > 1).any(axis=0), True).argmax())
    columns = [part.request, part.width, part.source_rank, part.source_offset, part.target_rank, part.target_offset]
    columns += [
        column[:, column.shape[1] - axes:] for column in (part.shape, part.source_strides, part.target_strides)
    ]
    scales = [part.source_scale.astype('<f8').tobytes(), part.target_scale.astype('<f8').tobytes()]
    integers = [np.ascontiguousarray(column, '<i8').tobytes() for column in columns]
    return int.from_bytes(hash_of([link.stage, *ends, *integers, *scales])[:8], 'little')
