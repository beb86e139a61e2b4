# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Pieces as boxes of the parameter, their axes in the parameter's order.

A piece is written as two strided views, which leaves its author free to list axes in any order, to add
or drop axes of extent 1, and to give those any stride. Union, algebra, validation and planner all start
from this one normal form instead: where the box lies in the parameter, and how each of the parameter's
axes steps through the shard. A transposed piece becomes a box with permuted dest strides.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from deepspeed.checkpoint.affine.columns import reach
from deepspeed.checkpoint.affine_geometry.strides import offsets_to_coordinates, product, row_major_strides


class NotABlockError(ValueError):
    """A piece that is no axis-aligned box of the parameter, although it may describe the shard truthfully."""


class WrapsError(NotABlockError):
    """A run that goes on into the next row, or further: it lies inside the parameter, but no box does there."""


class HoldersError(ValueError):
    """The locations that pieces name are not the locations whose pieces are there."""


@dataclass(frozen=True)
class Blocks:
    """B non-empty boxes of a parameter of N axes (a scalar counts as one axis of extent 1).

    Attributes:
        piece: int64[B], the piece (row of ``PieceColumns``) the block comes from.
        shard: int64[B], whose shard stores it, as in ``PieceColumns``.
        lower, extent: int64[B, N], coordinates in the parameter.
        offset: int64[B], elements, address of its first element in the flat shard.
        strides: int64[B, N], elements, step in the flat shard per axis of the parameter.
        holders: int64[B], index of its holder set. scale: float64[B].
    """
    piece: np.ndarray
    shard: np.ndarray
    lower: np.ndarray
    extent: np.ndarray
    offset: np.ndarray
    strides: np.ndarray
    holders: np.ndarray
    scale: np.ndarray

    @property
    def upper(self):
        return self.lower + self.extent

    def take(self, rows):
        """The blocks with these numbers."""
        return Blocks(*(getattr(self, field.name)[rows] for field in fields(self)))

    def moved(self, shards, sets):
        """The same blocks in a wider table, where their shards and holder sets have higher numbers."""
        return replace(self, shard=self.shard + shards, holders=self.holders + sets)

    def with_holders(self, holders):
        """The same blocks with other holder sets."""
        return replace(self, holders=holders)

    @classmethod
    def concatenate(cls, parts):
        """All blocks of several lists."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def cut(self, rows, lower, upper):
        """Parts of blocks: part k is block ``rows[k]`` between two corners inside it.

        A cut keeps the strides and moves the offset, so the shard still stores what it did.
        """
        own = self.take(rows)
        offset = own.offset + ((lower - own.lower) * own.strides).sum(axis=1)
        return Blocks(own.piece, own.shard, lower, upper - lower, offset, own.strides, own.holders, own.scale)


def box_shape(logical_shape):
    """The parameter's shape with at least one axis, as blocks count it."""
    return tuple(logical_shape) or (1, )


def parameter_blocks(columns, logical_shape):
    """Bring the non-empty pieces of a map into normal form.

    Raises:
        HoldersError: a piece that no location holds.
        NotABlockError: a piece whose source strides are not those of the parameter's axes.
        WrapsError: a run that goes on into the next row of the parameter.
        ValueError: a piece that leaves the parameter or its shard.
    """
    _refuse(columns,
            np.diff(columns.set_starts)[columns.holders] == 0, 'lists no location, so it has no holder', HoldersError)
    return placed_blocks(columns, logical_shape)


def placed_blocks(columns, logical_shape):
    """``parameter_blocks`` of pieces whose holders do not matter.

    Raises: as ``parameter_blocks``, but for ``HoldersError``.
    """
    shape = box_shape(logical_shape)
    check_dest(columns)
    rows = np.flatnonzero((columns.shape > 0).all(axis=1))
    inside = (columns.source_offset >= 0) & (columns.source_offset < product(shape))
    _refuse(columns, rows[~inside[rows]],
            f'has a source offset that lies outside a parameter of shape {tuple(logical_shape)}')

    extent, strides = _in_parameter_order(columns, rows, shape)
    lower = offsets_to_coordinates(columns.source_offset[rows], shape)
    _check_edges(columns, rows[(lower + extent > np.array(shape)).any(axis=1)], logical_shape)
    return Blocks(rows, columns.shard[rows], lower, extent, columns.dest_offset[rows], strides, columns.holders[rows],
                  columns.scale[rows])


def check_dest(columns):
    """Raise ``ValueError`` unless all non-empty pieces lie inside their shards and step forward in them."""
    filled = (columns.shape > 0).all(axis=1)
    low, high = reach(columns.dest_offset, columns.shape, columns.dest_strides)
    numel = columns.shard_numel[columns.shard]
    outside = np.flatnonzero(filled & ((low < 0) | (high >= numel)))
    if len(outside):
        piece = int(outside[0])
        raise ValueError(f'{describe_piece(columns, piece)} uses addresses {low[piece]} to {high[piece]}, but its '
                         f'shard has {numel[piece]} elements.')
    _refuse(columns, filled & ((columns.shape > 1) & (columns.dest_strides <= 0)).any(axis=1),
            'has dest strides that are not positive, so it would use the same shard addresses twice')


def _check_edges(columns, rows, logical_shape):
    """Raise for pieces that run over an edge: whether they leave the parameter or only the row decides how."""
    what = f'runs over the edge of the parameter of shape {tuple(logical_shape)}'
    _, high = reach(columns.source_offset[rows], columns.shape[rows], columns.source_strides[rows])
    _refuse(columns, rows[high >= product(logical_shape)], what)
    _refuse(columns, rows, f'{what} into its next row; flat_partition_map lowers flat runs to blocks', WrapsError)


def _in_parameter_order(columns, rows, shape):
    """Extents and dest strides of the pieces along the parameter's axes: int64[B, N] each."""
    size, source, dest = columns.shape[rows], columns.source_strides[rows], columns.dest_strides[rows]
    natural, long = np.array(row_major_strides(shape)), np.array(shape) > 1
    if size.shape[1] == len(shape) and ((size == 1) | ((source == natural) & long)).all():
        return size, _unspanned_strides(columns, rows, size, dest, natural)
    # An axis that a piece spans is recognised by its stride: those of axes longer than 1 all differ.
    extent = np.ones((len(rows), len(shape)), np.int64)
    strides = np.tile(natural, (len(rows), 1))
    for axis in range(size.shape[1]):
        spanned = np.flatnonzero(size[:, axis] > 1)
        matches = (source[spanned, axis, None] == natural) & long
        target = matches.argmax(axis=1)
        _refuse(
            columns, rows[spanned[~matches.any(axis=1)]],
            f'is no block of the parameter: its source strides are not those, {tuple(natural.tolist())}, of the '
            'parameter\'s axes', NotABlockError)
        _refuse(columns, rows[spanned[extent[spanned, target] > 1]],
                'is no block of the parameter: two of its axes run along one axis of the parameter', NotABlockError)
        extent[spanned, target] = size[spanned, axis]
        strides[spanned, target] = dest[spanned, axis]
    return extent, strides


def _unspanned_strides(columns, rows, size, dest, natural):
    """Give axes of extent 1 the stride that a longer piece would have there, so that neighbours can be joined."""
    ndim = size.shape[1]
    shard = columns.shard[rows]
    packed = np.ones((len(rows), ndim), np.int64)
    if columns.shard_shape.shape[1] >= ndim:
        for axis in range(ndim - 2, -1, -1):
            packed[:, axis] = packed[:, axis + 1] * columns.shard_shape[shard, axis + 1]
    plain = (columns.shard_ndim[shard] == ndim) & ((size == 1) | (dest == packed)).all(axis=1)
    own = np.where(dest > 0, dest, natural)
    return np.where(plain[:, None], packed, own)


def _refuse(columns, bad, what, error=ValueError):
    """Raise ``error`` for the first of some pieces, given as row numbers or as a mask."""
    bad = np.flatnonzero(bad) if bad.dtype == bool else bad
    if len(bad):
        raise error(f'{describe_piece(columns, int(bad[0]))} {what}.')


def describe_piece(columns, piece):
    """A piece in words, for messages: its rank, its place in the rank's list and its geometry."""
    shape, source_offset, source_strides, dest_offset, dest_strides, _, _ = next(columns.rows(piece, piece + 1))
    shard = columns.shard[piece]
    own = columns.shard_shape[shard, :columns.shard_ndim[shard]].tolist()
    return (f'rank {columns.rank(piece)} piece {columns.position(piece)} (shape {tuple(shape)}, source offset '
            f'{source_offset} strides {tuple(source_strides)}, dest offset {dest_offset} strides '
            f'{tuple(dest_strides)} in a shard of shape {tuple(own)})')
