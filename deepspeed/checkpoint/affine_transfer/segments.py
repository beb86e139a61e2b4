# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Strided shard-to-shard copies: one as an object, many as columns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Dict, Iterable, List, Tuple

import numpy as np

from deepspeed.checkpoint.affine.checks import MAX_AXES, MAX_ELEMENTS, is_invertible, shown
from deepspeed.checkpoint.affine_transfer import parsing
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError

# The fields with one entry per axis.
PER_AXIS = ('shape', 'source_strides', 'target_strides')


@dataclass(frozen=True)
class TransferSegment:
    """A block that moves between two flat shards, as one `as_strided` view of each.

    Args:
        source_rank: source location.
        source_offset: first element read, in elements of the flat source shard.
        source_strides: elements between neighbours along each axis of the source shard.
        target_rank: target location.
        target_offset: first element written, in elements of the flat target shard.
        target_strides: likewise for the target shard.
        shape: elements along each axis, the same on both sides.
        source_scale: factor by which the source holds the block.
        target_scale: factor by which the target holds it.

    The target receives ``source / source_scale * target_scale``, computed in the source's dtype and then
    cast; a factor of 1.0 is no arithmetic at all.

    Raises:
        AffineTransferError: a scale is zero, infinite or not a number, and so not invertible.

    Example::

        TransferSegment(0, 4, (8, 1), 1, 0, (4, 1), (2, 4)).numel  # 8
    """
    source_rank: int
    source_offset: int
    source_strides: Tuple[int, ...]
    target_rank: int
    target_offset: int
    target_strides: Tuple[int, ...]
    shape: Tuple[int, ...]
    source_scale: float = 1.0
    target_scale: float = 1.0

    def __post_init__(self):
        for name in ('source_scale', 'target_scale'):
            scale = getattr(self, name)
            if not is_invertible(scale):
                raise AffineTransferError(
                    f'{name} is {shown(scale)}, which is not invertible; expected a finite number '
                    'other than 0')

    def __repr__(self) -> str:
        """As a dataclass shows itself, without scales where there is nothing to scale."""
        shown = [field.name for field in fields(self) if self.is_scaled or not field.name.endswith('scale')]
        return f'TransferSegment({", ".join(f"{name}={getattr(self, name)!r}" for name in shown)})'

    @property
    def numel(self) -> int:
        """Elements moved."""
        return math.prod(self.shape)

    @property
    def is_scaled(self) -> bool:
        """Whether moving this segment takes arithmetic."""
        return self.source_scale != 1.0 or self.target_scale != 1.0

    def to_dict(self) -> Dict[str, List]:
        """Plain ints and lists (and floats in a scaled segment).

        An end is ``[location, offset, strides]``. A scaled segment appends the end's scale, so that a
        reader which knows three items fails on it rather than move it unscaled.
        """
        source = [self.source_rank, self.source_offset, list(self.source_strides)]
        target = [self.target_rank, self.target_offset, list(self.target_strides)]
        if self.is_scaled:
            source.append(self.source_scale)
            target.append(self.target_scale)
        return {'shape': list(self.shape), 'source': source, 'target': target}

    @classmethod
    def from_dict(cls, entry: Dict[str, List], where: str = 'segment') -> 'TransferSegment':
        """Read what ``to_dict`` wrote, here or in DeepSpeed.

        Args:
            entry: the dict, which is not trusted.
            where: how an error names the entry.

        Raises:
            AffineTransferError: anything but such a dict, with the place that is wrong.
        """
        parsing.expect_keys(entry, where, ('shape', 'source', 'target'))
        shape = parsing.integers(entry['shape'], f'{where} shape', 1)
        if len(shape) > MAX_AXES:
            raise AffineTransferError(f'{where} has {len(shape)} axes; expected at most {MAX_AXES}')
        source_rank, source_offset, source_strides, source_scale = _end(entry['source'], f'{where} source', shape)
        target_rank, target_offset, target_strides, target_scale = _end(entry['target'], f'{where} target', shape)
        if len(entry['source']) != len(entry['target']):
            raise AffineTransferError(f'{where}: one end has a scale and the other has none')
        return cls(source_rank, source_offset, source_strides, target_rank, target_offset, target_strides, shape,
                   source_scale, target_scale)


def _end(value, where: str, shape: Tuple[int, ...]) -> Tuple[int, int, Tuple[int, ...], float]:
    """Location, offset, strides and scale of one end, with its last address known to be within reach."""
    parsing.expect_list(value, where)
    if len(value) not in (3, 4):
        raise AffineTransferError(f'{where} has {len(value)} items; expected location, offset, strides and, in a '
                                  'scaled segment, scale')
    rank = parsing.location(value[0], f'{where} location')
    offset = parsing.integer(value[1], f'{where} offset', 0)
    strides = parsing.integers(value[2], f'{where} strides', 0)
    if len(strides) != len(shape):
        raise AffineTransferError(f'{where} has {len(strides)} strides for {len(shape)} axes')
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
    if max(last, math.prod(shape)) > MAX_ELEMENTS:
        raise AffineTransferError(f'{where} ends at element {last}, beyond 2**62, which no address can reach')
    scale = parsing.scale(value[3], f'{where} scale') if len(value) == 4 else 1.0
    return rank, offset, strides, scale


@dataclass(frozen=True, eq=False)
class SegmentColumns:
    """S segments of N axes each as arrays, S entries or S rows per column.

    Args:
        source_rank, source_offset: int64[S], as in TransferSegment.
        source_strides: int64[S, N].
        target_rank, target_offset: int64[S].
        target_strides: int64[S, N].
        shape: int64[S, N].
        source_scale, target_scale: float64[S].

    The arrays are read-only; they share memory with what was given where dtype and layout allow it.

    Raises:
        AffineTransferError: a column's dimensions do not fit the others.

    Example::

        columns = SegmentColumns.from_segments([TransferSegment(0, 0, (1, ), 1, 4, (1, ), (4, ))])
        columns.numel  # array([4])
    """
    source_rank: np.ndarray
    source_offset: np.ndarray
    source_strides: np.ndarray
    target_rank: np.ndarray
    target_offset: np.ndarray
    target_strides: np.ndarray
    shape: np.ndarray
    source_scale: np.ndarray
    target_scale: np.ndarray

    def __post_init__(self):
        rows = np.shape(self.shape)
        if len(rows) != 2:
            raise AffineTransferError(f'shape column has {len(rows)} dimensions; expected segments x axes')
        for field in fields(self):
            matrix = field.name in PER_AXIS
            dtype = np.float64 if field.name.endswith('scale') else np.int64
            column = np.ascontiguousarray(getattr(self, field.name), dtype=dtype).view()
            expected = rows if matrix else rows[:1]
            if column.shape != expected:
                raise AffineTransferError(f'{field.name} column is {column.shape}; expected {expected}')
            column.flags.writeable = False
            object.__setattr__(self, field.name, column)

    def __len__(self) -> int:
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """Axes of every segment."""
        return self.shape.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    @property
    def numel(self) -> np.ndarray:
        """int64[S], elements per segment."""
        return self.shape.prod(axis=1, dtype=np.int64)

    @property
    def source_last(self) -> np.ndarray:
        """int64[S], the last source address that each segment reads."""
        return self.source_offset + ((self.shape - 1) * self.source_strides).sum(axis=1)

    @property
    def target_last(self) -> np.ndarray:
        """int64[S], the last target address that each segment writes."""
        return self.target_offset + ((self.shape - 1) * self.target_strides).sum(axis=1)

    @property
    def is_scaled(self) -> np.ndarray:
        """bool[S], whether moving the segment takes arithmetic."""
        return (self.source_scale != 1.0) | (self.target_scale != 1.0)

    def take(self, index) -> 'SegmentColumns':
        """The segments that a numpy index, mask or slice picks."""
        return SegmentColumns(*(getattr(self, field.name)[index] for field in fields(self)))

    def segment(self, index: int) -> TransferSegment:
        """One segment as an object."""
        return TransferSegment(source_rank=int(self.source_rank[index]),
                               source_offset=int(self.source_offset[index]),
                               source_strides=tuple(self.source_strides[index].tolist()),
                               target_rank=int(self.target_rank[index]),
                               target_offset=int(self.target_offset[index]),
                               target_strides=tuple(self.target_strides[index].tolist()),
                               shape=tuple(self.shape[index].tolist()),
                               source_scale=float(self.source_scale[index]),
                               target_scale=float(self.target_scale[index]))

    def segments(self) -> Iterable[TransferSegment]:
        """All segments as objects, in order."""
        columns = [getattr(self, field.name).tolist() for field in fields(self)]
        for rank, offset, strides, to_rank, to_offset, to_strides, shape, scale, to_scale in zip(*columns):
            yield TransferSegment(rank, offset, tuple(strides), to_rank, to_offset, tuple(to_strides), tuple(shape),
                                  scale, to_scale)

    @classmethod
    def from_segments(cls, segments: Iterable[TransferSegment], ndim: int = 0) -> 'SegmentColumns':
        """Columns of these segments.

        Args:
            segments: segments which all have the same number of axes.
            ndim: the number of axes where there is no segment to tell it.

        Raises:
            AffineTransferError: segments of different numbers of axes, strides that do not fit the shape,
                or a number beyond int64.
        """
        segments = list(segments)
        axes = len(segments[0].shape) if segments else ndim
        for index, segment in enumerate(segments):
            for name in PER_AXIS:
                if len(getattr(segment, name)) != axes:
                    raise AffineTransferError(f'segment {index}: {name} has {len(getattr(segment, name))} axes; '
                                              f'expected {axes}, as in the first segment')
        try:
            return cls(*(_column(segments, field.name, axes) for field in fields(cls)))
        except OverflowError:
            raise AffineTransferError('a segment has an offset, a stride or a size beyond int64') from None


def _column(segments: List[TransferSegment], name: str, axes: int) -> np.ndarray:
    values = [getattr(segment, name) for segment in segments]
    if name in PER_AXIS:
        return np.array(values, dtype=np.int64).reshape(len(segments), axes)
    return np.array(values, dtype=np.float64 if name.endswith('scale') else np.int64)


class SegmentView(Sequence):
    """The segments of columns as a sequence; objects are made when they are asked for.

    Equal to a tuple or list of the same segments, and hashes as the tuple does.
    """
    __slots__ = ('columns', )

    def __init__(self, columns: SegmentColumns):
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return SegmentView(self.columns.take(index))
        count = len(self.columns)
        if not -count <= index < count:
            raise IndexError(f'segment {index} of {count}')
        return self.columns.segment(index)

    def __iter__(self):
        return iter(self.columns.segments())

    def __eq__(self, other) -> bool:
        if isinstance(other, SegmentView):
            return self._same_columns(other.columns)
        if not isinstance(other, (tuple, list)):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other))

    def _same_columns(self, other: SegmentColumns) -> bool:
        if len(other) == 0 and len(self) == 0:
            return True
        return all(
            np.array_equal(getattr(self.columns, field.name), getattr(other, field.name))
            for field in fields(SegmentColumns))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        if len(self) <= 8:
            return repr(tuple(self))
        return f'<{len(self)} segments, from {self[0]!r} to {self[-1]!r}>'
