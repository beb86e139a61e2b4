# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The message streams between processes, cut into rounds."""

from dataclasses import dataclass
from typing import List, Sequence, Tuple

import numpy as np

from deepspeed.checkpoint.affine_geometry.runs import lower_run
from deepspeed.checkpoint.affine_transfer_executor.buffers import Piece


@dataclass(frozen=True)
class Part:
    """A box of one segment inside a message.

    Attributes:
        request: index of the request.
        segment: index of the segment in the request's plan.
        start: first byte in the message.
        source, target: where the values stand in either shard.
    """
    request: int
    segment: int
    start: int
    source: Piece
    target: Piece


@dataclass(frozen=True)
class Link:
    """All that one process sends to another in a batch: a stream of bytes, one segment after the other.

    Attributes:
        peer: the process at the other end.
        requests: int64[S], the request of each segment.
        segments: int64[S], its index in that request's plan.
        widths: int64[S], bytes per element on the wire, never ascending: all widths are powers of two, so
            every segment starts at a multiple of its own width without padding.
        starts: int64[S + 1], where each segment starts in the stream, in bytes, and where the last one ends.
    """
    peer: int
    requests: np.ndarray
    segments: np.ndarray
    widths: np.ndarray
    starts: np.ndarray

    @property
    def numbytes(self) -> int:
        return int(self.starts[-1])

    def chunk(self, index: int, limit: int) -> Tuple[int, int]:
        """The bytes ``[start, stop)`` of the stream which travel in round ``index``; both 0 when none do."""
        start = index * limit
        if start >= self.numbytes:
            return 0, 0
        return start, min(start + limit, self.numbytes)

    def requests_in(self, start: int, stop: int) -> List[int]:
        """The requests that have segments in these bytes, in order."""
        return np.unique(self.requests[self._span(start, stop)]).tolist()

    def parts(self, start: int, stop: int, columns: Sequence) -> List[Part]:
        """The boxes that make up the bytes ``[start, stop)``; ``columns`` are the requests' SegmentColumns."""
        parts = []
        for entry in range(*self._span(start, stop).indices(len(self.requests))):
            low, high = int(self.starts[entry]), int(self.starts[entry + 1])
            width = int(self.widths[entry])
            first, last = max(start - low, 0) // width, (min(stop, high) - low) // width
            parts += _boxes(columns, int(self.requests[entry]), int(self.segments[entry]), first, last,
                            max(low, start) - start, width)
        return parts

    def _span(self, start: int, stop: int) -> slice:
        first = int(np.searchsorted(self.starts, start, side='right')) - 1
        return slice(first, int(np.searchsorted(self.starts, stop, side='left')))


def _boxes(columns: Sequence, request: int, index: int, first: int, last: int, start: int, width: int) -> List[Part]:
    """Elements ``[first, last)`` of one segment as parts, the first of them at byte ``start``."""
    segment = columns[request].segment(index)
    source = Piece(segment.source_offset, segment.source_strides, segment.shape)
    target = Piece(segment.target_offset, segment.target_strides, segment.shape)
    if (first, last) == (0, source.numel):
        return [Part(request, index, start, source, target)]
    parts = []
    for box in lower_run(segment.shape, first, last):
        part = Part(request, index, start, source.box(box.origin, box.extent), target.box(box.origin, box.extent))
        start += part.source.numel * width
        parts.append(part)
    return parts


@dataclass(frozen=True)
class Schedule:
    """What one process sends, receives and copies.

    Attributes:
        sends, receives: links, ordered so that processes meet each other in pairs.
        locals: per request, the indices of the segments that stay on this process.
        chunk_bytes: most bytes of a link in one round.
        rounds: rounds of the whole batch, the same on every process.
    """
    sends: Tuple[Link, ...]
    receives: Tuple[Link, ...]
    locals: Tuple[np.ndarray, ...]
    chunk_bytes: int
    rounds: int

    @property
    def segments(self) -> int:
        return sum(len(link.requests) for link in self.sends + self.receives) + sum(map(len, self.locals))


def make_schedule(requests: Sequence, rank: int, size: int, bytes_per_peer: int) -> Schedule:
    """Cut a batch into links and rounds.

    The round of a chunk is its number within its link, and what is in it follows from the plans, the
    endpoints and the budget alone, so both ends of a link always expect the same bytes.

    Args:
        requests: values with ``columns``, ``source_process`` and ``target_process`` (int64 per segment) and
            ``width`` (bytes per element on the wire).
        rank: this process.
        size: processes in the group.
        bytes_per_peer: the staging budget; at least the widest element.
    """
    table = _Table(requests)
    widest = max((request.width for request in requests), default=1)
    limit = bytes_per_peer // widest * widest
    remote = np.flatnonzero(table.source != table.target)
    pair = table.source[remote] * size + table.target[remote]
    _, inverse = np.unique(pair, return_inverse=True)
    totals = np.zeros(int(inverse.max()) + 1 if len(inverse) else 0, dtype=np.int64)
    np.add.at(totals, inverse, table.numbytes[remote])
    rounds = int(-(-totals.max() // limit)) if len(totals) else 0
    sends = table.links(table.source == rank, table.target, rank)
    receives = table.links(table.target == rank, table.source, rank)
    here = (table.source == rank) & (table.target == rank)
    locals_ = tuple(table.segment[here & (table.request == index)] for index in range(len(requests)))
    # In turn, every process sends ahead of itself and receives from behind itself at the same distance.
    sends.sort(key=lambda link: (link.peer - rank) % size)
    receives.sort(key=lambda link: (rank - link.peer) % size)
    return Schedule(tuple(sends), tuple(receives), locals_, limit, rounds)


class _Table:
    """All segments of all requests, one row each, in the order in which they are sent."""

    def __init__(self, requests: Sequence):
        counts = [len(request.columns) for request in requests]
        request = np.repeat(np.arange(len(requests)), counts)
        width = np.repeat(np.array([item.width for item in requests], dtype=np.int64), counts)
        order = np.argsort(-width, kind='stable')
        self.request = request[order]
        self.width = width[order]
        self.segment = _joined([np.arange(count) for count in counts])[order]
        self.source = _joined([item.source_process for item in requests])[order]
        self.target = _joined([item.target_process for item in requests])[order]
        self.numbytes = _joined([item.columns.numel for item in requests])[order] * self.width

    def links(self, mine: np.ndarray, peers: np.ndarray, rank: int) -> List[Link]:
        """One link per other process among ``peers``, of the rows that are mine."""
        rows = np.flatnonzero(mine & (peers != rank))
        rows = rows[np.argsort(peers[rows], kind='stable')]
        names, first = np.unique(peers[rows], return_index=True)
        return [self._link(int(peer), part) for peer, part in zip(names, np.split(rows, first[1:]))]

    def _link(self, peer: int, rows: np.ndarray) -> Link:
        starts = np.concatenate([[0], np.cumsum(self.numbytes[rows])]).astype(np.int64)
        return Link(peer, self.request[rows], self.segment[rows], self.width[rows], starts)


def _joined(columns: List[np.ndarray]) -> np.ndarray:
    return np.concatenate(columns).astype(np.int64) if columns else np.zeros(0, dtype=np.int64)
