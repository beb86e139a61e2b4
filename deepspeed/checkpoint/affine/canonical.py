# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Canonical form: blocks that continue each other are one piece, and pieces stand in order of address."""

from dataclasses import replace

import numpy as np

from deepspeed.checkpoint.affine.columns import PieceColumns
from deepspeed.checkpoint.affine.param_map import ParamAffineMap
from deepspeed.checkpoint.affine_geometry.columns import KEY_LIMIT, expand_ranges, row_ids
from deepspeed.checkpoint.affine_geometry.merge import BlockPairs, merge_blocks
from deepspeed.checkpoint.affine_geometry.strides import product, row_major_strides


def merge_adjacent(blocks, shape):
    """Join blocks of one shard, one holder set and one scale that continue each other in parameter and shard.

    ``shape`` is the parameter's, at least one axis.
    """
    # With one spare index per axis an address can only continue along an axis, not wrap into the next row.
    roomy = [size + 1 if size > 1 else 1 for size in shape]
    if product(roomy) >= KEY_LIMIT:
        raise ValueError(f'A parameter of shape {tuple(shape)} is too large to number its coordinates in 62 bits.')
    steps = np.where(np.array(shape) > 1, row_major_strides(roomy), 0)
    kind, _ = row_ids(blocks.shard, blocks.holders, blocks.scale.view(np.int64))
    merged = merge_blocks(
        BlockPairs(kind, blocks.extent, blocks.lower @ steps, np.tile(steps, (len(kind), 1)), blocks.offset,
                   blocks.strides, np.arange(len(kind))))
    return replace(blocks.take(merged.row), extent=merged.extent, strides=merged.second_strides)


def canonical_map(blocks, logical_shape, locations):
    """The map that merged blocks stand for; pieces by shard, then by address.

    Args:
        locations: anything with the ``PieceColumns`` fields of locations, shards and holder sets; sets that no block
            uses are left out.
    """
    blocks = blocks.take(np.lexsort((blocks.offset, blocks.shard)))
    ndim, count = len(logical_shape), len(blocks.shard)
    natural = np.array(row_major_strides(logical_shape), np.int64)
    used, holders = np.unique(blocks.holders, return_inverse=True)
    starts, members = _take_sets(locations.set_starts, locations.set_members, used)
    columns = PieceColumns(location_ids=locations.location_ids,
                           shard_ndim=locations.shard_ndim,
                           shard_shape=locations.shard_shape,
                           shard=blocks.shard,
                           ndim=np.full(count, ndim),
                           shape=blocks.extent[:, :ndim],
                           source_offset=blocks.lower[:, :ndim] @ natural if ndim else np.zeros(count, np.int64),
                           source_strides=np.tile(natural, (count, 1)),
                           dest_offset=blocks.offset,
                           dest_strides=blocks.strides[:, :ndim],
                           holders=holders,
                           set_starts=starts,
                           set_members=members,
                           scale=blocks.scale)
    return ParamAffineMap.from_columns(logical_shape, columns)


def _take_sets(set_starts, set_members, chosen):
    """Some of the sets of a table of starts and members, in the order chosen."""
    owner, at = expand_ranges(set_starts[chosen], set_starts[chosen + 1])
    return np.searchsorted(owner, np.arange(len(chosen) + 1)), set_members[at]
