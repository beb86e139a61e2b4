# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A map of the shards of a map: ZeRO-3 partitions of tensor-parallel shards, and the like."""

from collections import defaultdict
from dataclasses import replace

import numpy as np

from deepspeed.checkpoint.affine.blocks import Blocks, NotABlockError, box_shape, parameter_blocks
from deepspeed.checkpoint.affine.canonical import canonical_map
from deepspeed.checkpoint.affine.checks import listed, mapping
from deepspeed.checkpoint.affine.columns import PieceColumns
from deepspeed.checkpoint.affine.overlay import Layer, Locations, cut_at_layers, join_locations
from deepspeed.checkpoint.affine.param_map import as_map
from deepspeed.checkpoint.affine.regions import held_regions, place_in_set
from deepspeed.checkpoint.affine.union import check_disjoint_locations, naming_part
from deepspeed.checkpoint.affine_geometry.join import overlapping_pairs
from deepspeed.checkpoint.affine_geometry.runs import lower_runs
from deepspeed.checkpoint.affine_geometry.strides import product, row_major_strides


def compose(outer, inner_maps):
    """Describe a parameter whose shards are themselves held in pieces.

    Args:
        outer: ``ParamAffineMap`` of the parameter.
        inner_maps: mapping from a location of ``outer`` to the ``ParamAffineMap`` of its shard, whose logical shape is
            the shard's shape. Locations that are not named keep their shards.

    Returns:
        ``ParamAffineMap`` over the locations of the inner maps and the outer locations that keep theirs, in canonical
        form. Where outer shards were replicas, each element lists the holders inside all of them. Scales multiply.

    Raises:
        ValueError: a location that ``outer`` does not have, a shape that is not its shard's, one location in two maps,
            a piece that is no block of the parameter or of its shard.

    Example: two TP shards of two rows each, each cut into two ZeRO-3 partitions.

    >>> from deepspeed.checkpoint.affine.constructors import contiguous_split_map
    >>> from deepspeed.checkpoint.affine.partitions import zero3_partition_map
    >>> tp = contiguous_split_map((4, 3), [2, 2], 0)
    >>> partitions = {rank: zero3_partition_map((2, 3), 2, locations=[10 * rank, 10 * rank + 1]) for rank in (0, 1)}
    >>> both = compose(tp, partitions)
    >>> [piece.source_offset for piece in both.pieces_by_rank[10]]
    [6]
    """
    _check_inner(as_map(outer, 'compose: outer'), mapping(inner_maps, 'compose: inner_maps'))
    logical_shape, columns = outer.logical_shape, outer.columns
    shape = box_shape(logical_shape)
    blocks = parameter_blocks(columns, logical_shape)
    held_regions(columns, blocks, logical_shape)
    # Holder 0 of every set, holder 1 of every set, ...: blocks of one turn are disjoint.
    turn = place_in_set(columns, blocks) - columns.set_starts[blocks.holders]

    ids = columns.shard_ids.tolist()
    # Blocks are in the order of their pieces, and those in the order of their shards.
    starts = np.searchsorted(blocks.shard, np.arange(len(ids) + 1)).tolist()
    tables = [
        inner_maps[location].columns if location in inner_maps else _own_table(columns, shard)
        for shard, location in enumerate(ids)
    ]
    locations, first_shard, first_set = join_locations(tables)
    parts, layers = [], defaultdict(list)
    for shard, location in enumerate(ids):
        own = blocks.take(slice(starts[shard], starts[shard + 1]))
        if location in inner_maps:
            with naming_part('compose', f'of location {location}'):
                inside, row = _inside(own, inner_maps[location], logical_shape)
        else:
            inside, row = replace(own, shard=own.shard * 0, holders=own.holders * 0), np.arange(len(own.shard))
        regions = held_regions(tables[shard], inside, logical_shape)
        region_turn = turn[starts[shard] + row[regions.blocks[regions.starts[:-1]]]]
        for number in np.unique(region_turn).tolist():
            at = region_turn == number
            layers[number].append((regions.lower[at], regions.upper[at], regions.holders[at] + first_set[shard]))
        parts.append(inside.moved(first_shard[shard], first_set[shard]))
    if not layers:
        return canonical_map(Blocks.concatenate(parts), logical_shape, locations)
    stacked = [Layer(*(np.concatenate(column) for column in zip(*layers[number]))) for number in sorted(layers)]
    merged, locations = cut_at_layers(Blocks.concatenate(parts), stacked, locations, shape)
    return canonical_map(merged, logical_shape, locations)


def _check_inner(outer, inner_maps):
    for location, inner in inner_maps.items():
        if location not in outer.shard_shapes:
            raise ValueError(f'compose: the outer map has no shard at location {location}; it has '
                             f'{listed(outer.shard_shapes)}.')
        if as_map(inner, f'compose: inner_maps[{location}]').logical_shape != outer.shard_shapes[location]:
            raise ValueError(
                f'compose: the shard of location {location} has shape {outer.shard_shapes[location]}, but '
                f'its map describes one of shape {inner.logical_shape}.')
    kept = [location for location in outer.shard_shapes if location not in inner_maps]
    named = [[location] for location in kept]
    named += [list(inner.shard_shapes) for inner in inner_maps.values()]
    check_disjoint_locations(named, 'compose')


def _own_table(columns, shard):
    """The location of one shard alone, held by nobody else."""
    row = slice(shard, shard + 1)
    return Locations(columns.location_ids[row], columns.shard_ndim[row], columns.shard_shape[row], np.array([0, 1]),
                     np.array([0]))


def _inside(blocks, inner, logical_shape):
    """The blocks of an inner map as blocks of the parameter, and which outer block each lies in.

    Args:
        blocks: the outer blocks of the one shard that ``inner`` describes.
    """
    own = parameter_blocks(inner.columns, inner.logical_shape)
    if len(inner.logical_shape) == 1:
        return _inside_flat(blocks, own)
    outer = _seen_from_shard(blocks, inner.logical_shape, logical_shape)
    row, part = overlapping_pairs(outer.lower, outer.upper, own.lower, own.upper)
    lower, upper = np.maximum(outer.lower[row], own.lower[part]), np.minimum(outer.upper[row], own.upper[part])
    there, here = outer.cut(row, lower, upper), own.cut(part, lower, upper)
    table = _one_shard_table(there.extent, there.offset, there.strides, here.offset, here.strides,
                             here.scale * there.scale,
                             np.iinfo(np.int64).max)
    seen = parameter_blocks(table, logical_shape)
    return replace(seen, piece=here.piece, shard=here.shard, holders=here.holders), row


def _seen_from_shard(blocks, shard_shape, logical_shape):
    """Outer blocks with their sides exchanged: boxes of the shard whose 'addresses' are flat parameter offsets."""
    natural = np.array(row_major_strides(box_shape(logical_shape)), np.int64)
    table = _one_shard_table(blocks.extent, blocks.offset, blocks.strides, blocks.lower @ natural,
                             np.tile(natural, (len(blocks.shard), 1)), blocks.scale, product(logical_shape))
    return parameter_blocks(table, shard_shape)


def _one_shard_table(shape, source_offset, source_strides, dest_offset, dest_strides, scale, numel):
    """Columns of pieces that all lie in one flat shard of ``numel`` elements."""
    count = len(shape)
    return PieceColumns(location_ids=np.zeros(1, np.int64),
                        shard_ndim=np.ones(1, np.int64),
                        shard_shape=np.full((1, 1), numel),
                        shard=np.zeros(count, np.int64),
                        ndim=np.full(count, shape.shape[1]),
                        shape=shape,
                        source_offset=source_offset,
                        source_strides=source_strides,
                        dest_offset=dest_offset,
                        dest_strides=dest_strides,
                        holders=np.zeros(count, np.int64),
                        set_starts=np.array([0, 1]),
                        set_members=np.zeros(1, np.int64),
                        scale=scale)


def _inside_flat(blocks, own):
    """Blocks of a flat shard as blocks of the parameter; outer blocks may stride through the shard in any order.

    In the order of their addresses, the elements of an outer block are those of a box with its axes sorted by
    stride. A run of the shard is then a run of that box, and lowers to boxes as any run does.
    """
    parts, rows = [blocks.take(slice(0, 0))], [np.zeros(0, np.int64)]
    for row in range(len(blocks.shard)):
        order = np.argsort(-np.where(blocks.extent[row] > 1, blocks.strides[row], 0), kind='stable')
        extent, strides = blocks.extent[row][order], blocks.strides[row][order]
        offset = int(blocks.offset[row])
        if (np.cumsum(((extent - 1) * strides)[::-1])[::-1][1:] >= strides[:-1])[extent[:-1] > 1].any():
            raise NotABlockError(f'an outer piece of shape {tuple(blocks.extent[row].tolist())} has dest strides '
                                 f'{tuple(blocks.strides[row].tolist())}, which interleave in its flat shard')
        start, stop = (_elements_below(bound[:, 0] - offset, extent, strides) for bound in (own.lower, own.upper))
        run, digits, size = lower_runs(tuple(extent.tolist()), start, stop)
        lower, part_extent, steps = np.empty_like(digits), np.empty_like(size), np.empty_like(size)
        lower[:, order], part_extent[:, order] = digits, size
        steps[:, order] = strides * own.strides[run]
        begin = offset + digits @ strides - own.lower[run, 0]
        parts.append(
            Blocks(own.piece[run], own.shard[run], blocks.lower[row] + lower, part_extent,
                   own.offset[run] + begin * own.strides[run, 0], steps, own.holders[run],
                   own.scale[run] * blocks.scale[row]))
        rows.append(np.full(len(run), row))
    return Blocks.concatenate(parts), np.concatenate(rows)


def _elements_below(address, extent, strides):
    """How many elements of a block have an address, counted from its first, below each of the given: int64[n]."""
    rest, count = np.maximum(address, 0), np.zeros(len(address), np.int64)
    inner = np.array(row_major_strides(extent), np.int64)
    for axis, step in enumerate(strides.tolist()):
        index = np.minimum(rest // step, extent[axis])
        count += index * inner[axis]
        # Beyond the last index nothing more is counted; within the axis the rest lies in the axes after it.
        rest = np.where(index < extent[axis], rest - index * step, 0)
    return count + (rest > 0)
