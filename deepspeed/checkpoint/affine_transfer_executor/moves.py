# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""All segments of a batch in one table, whatever their parameters and numbers of axes."""

from dataclasses import dataclass, fields
from typing import Sequence

import numpy as np

# Stages follow one another on every process: only the first reads source buffers. Then receivers pass on what their
# target buffers have, and last a process copies what it needs in further buffers of its own.
FIRST_HOP, SECOND_HOP, DOUBLES = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Moves:
    """M copies from buffer to buffer, one row each; K is the largest number of axes in the batch.

    Args:
        stage: int64[M], FIRST_HOP, SECOND_HOP or DOUBLES.
        request: int64[M], index of the parameter. width: int64[M], bytes of an element on the wire.
        source_process, target_process: int64[M].
        source_rank, source_offset: int64[M], the location that is read (a target location after the FIRST_HOP) and
            the first element of the row-major buffer that is. source_strides: int64[M, K].
        target_rank, target_offset, target_strides: likewise, what is written.
        shape: int64[M, K]; missing axes are first, of size 1 and stride 0.
        source_scale, target_scale: float64[M].
    """
    stage: np.ndarray
    request: np.ndarray
    width: np.ndarray
    source_process: np.ndarray
    target_process: np.ndarray
    source_rank: np.ndarray
    source_offset: np.ndarray
    source_strides: np.ndarray
    target_rank: np.ndarray
    target_offset: np.ndarray
    target_strides: np.ndarray
    shape: np.ndarray
    source_scale: np.ndarray
    target_scale: np.ndarray

    def __len__(self) -> int:
        return len(self.request)

    @property
    def numel(self) -> np.ndarray:
        """int64[M], elements per move."""
        return self.shape.prod(axis=1, dtype=np.int64)

    @property
    def numbytes(self) -> np.ndarray:
        """int64[M], bytes per move on the wire."""
        return self.numel * self.width

    @property
    def is_local(self) -> np.ndarray:
        """bool[M], whether both ends are on one process."""
        return self.source_process == self.target_process

    def take(self, rows) -> 'Moves':
        """The moves that a numpy index, mask or slice picks."""
        return Moves(*(getattr(self, field.name)[rows] for field in fields(self)))

    def of_process(self, rank: int) -> 'Moves':
        """What a process sends, receives or copies."""
        return self.take(np.flatnonzero((self.source_process == rank) | (self.target_process == rank)))

    def joined(self, other: 'Moves') -> 'Moves':
        """These moves and then the others, of the same batch."""
        return Moves(
            *(np.concatenate([getattr(self, field.name), getattr(other, field.name)]) for field in fields(self)))

    @classmethod
    def of(cls, requests: Sequence) -> 'Moves':
        """The segments of PreparedRequests, in order."""
        counts = np.array([len(request.columns) for request in requests], np.int64)
        axes = max((request.columns.ndim for request in requests), default=0)
        request = np.repeat(np.arange(len(requests)), counts)
        plain = ('source_rank', 'source_offset', 'source_scale', 'target_rank', 'target_offset', 'target_scale')
        return cls(stage=np.zeros(len(request), np.int64),
                   request=request,
                   width=np.array([item.width for item in requests], np.int64)[request],
                   source_process=_stacked([item.source_process for item in requests], np.int64),
                   target_process=_stacked([item.target_process for item in requests], np.int64),
                   source_strides=_padded(requests, counts, axes, 'source_strides', 0),
                   target_strides=_padded(requests, counts, axes, 'target_strides', 0),
                   shape=_padded(requests, counts, axes, 'shape', 1),
                   **{name: _joined(requests, name)
                      for name in plain})


def _joined(requests: Sequence, name: str) -> np.ndarray:
    return _stacked([getattr(item.columns, name) for item in requests],
                    np.float64 if name.endswith('scale') else np.int64)


def _stacked(columns: Sequence[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate(columns).astype(dtype, copy=False) if columns else np.zeros(0, dtype)


def _padded(requests: Sequence, counts: np.ndarray, axes: int, name: str, fill: int) -> np.ndarray:
    table = np.full((int(counts.sum()), axes), fill, np.int64)
    starts = np.cumsum(counts) - counts
    for item, start, count in zip(requests, starts.tolist(), counts.tolist()):
        table[start:start + count, axes - item.columns.ndim:] = getattr(item.columns, name)
    return table
