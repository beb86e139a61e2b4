# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of the layouts that tensor-parallel layers cut a parameter into.

All of them cut along one axis, so a piece is told by three columns: where it starts on that axis in the parameter,
where in the shard, and how wide it is. Sizes that do not add up to the axis are legal: the map is then one of a part,
and coverage checks say what is missing.
"""

from itertools import chain

import numpy as np

from deepspeed.checkpoint.affine.checks import (MAX_ELEMENTS, axis_index, count, integer, mapping, rank_count, sizes,
                                                span, widths)
from deepspeed.checkpoint.affine.columns import PieceColumns, int64_column
from deepspeed.checkpoint.affine.param_map import ParamAffineMap
from deepspeed.checkpoint.affine.piece import AffinePiece
from deepspeed.checkpoint.affine_geometry.columns import expand_ranges
from deepspeed.checkpoint.affine_geometry.strides import product, row_major_strides


def replicated_map(shape, tp_degree, scale=1.0):
    """Return the map of a parameter that every rank holds whole.

    Args:
        shape: shape of the parameter.
        tp_degree: number of ranks.
        scale: what every rank multiplies the parameter by. A row-parallel layer holds its bias divided by the number
            of ranks, so that the all-reduced sum adds it once.

    Raises:
        ValueError: a scale of zero, NaN or infinity, more than 2**24 ranks.

    Example::

        >>> replicated_map((8, ), 2, scale=0.5).shard_shapes
        {0: (8,), 1: (8,)}
    """
    shape = sizes(shape, 'shape')
    ranks = rank_count(tp_degree, 'tp_degree')
    strides = row_major_strides(shape)
    piece = AffinePiece(shape, 0, strides, 0, strides, (), scale)
    columns = PieceColumns(location_ids=np.arange(ranks),
                           shard_ndim=np.full(ranks, len(shape)),
                           shard_shape=np.tile(shape, (ranks, 1)),
                           shard=np.arange(ranks),
                           ndim=np.full(ranks, len(shape)),
                           shape=np.tile(shape, (ranks, 1)),
                           source_offset=np.zeros(ranks),
                           source_strides=np.tile(strides, (ranks, 1)),
                           dest_offset=np.zeros(ranks),
                           dest_strides=np.tile(strides, (ranks, 1)),
                           holders=np.zeros(ranks),
                           set_starts=[0, ranks],
                           set_members=np.arange(ranks),
                           scale=np.full(ranks, piece.scale))
    return ParamAffineMap.from_columns(shape, columns)


def contiguous_split_map(shape, per_rank_sizes, partition_dim):
    """Return the map of a parameter that is cut into one block per rank along one axis.

    Args:
        shape: shape of the parameter.
        per_rank_sizes: width of each rank's block on that axis, uneven or zero as it may be. Where they do not add up
            to the axis the map is one that ``validate_coverage`` and the planner refuse.
        partition_dim: the axis.

    Raises:
        IndexError: an axis that the parameter does not have.
        ValueError: a negative width, widths that no address reaches.

    Example: seven rows over two ranks::

        >>> contiguous_split_map((7, 3), [4, 3], 0).shard_shapes
        {0: (4, 3), 1: (3, 3)}
    """
    shape = sizes(shape, 'shape')
    axis = axis_index(partition_dim, shape, 'partition_dim')
    width = np.array(widths(per_rank_sizes, 'per_rank_sizes'), dtype=np.int64)
    ranks = np.arange(len(width))
    return _axis_map(shape,
                     axis,
                     location_ids=ranks,
                     shard_width=width,
                     shard=ranks,
                     source_start=np.cumsum(width) - width,
                     dest_start=np.zeros_like(width),
                     width=width,
                     holders=ranks)


def sub_param_map(shape, sub_dim_sizes, shard_widths, partition_dim):
    """Return the map of a parameter that is a row of sub-parameters, each cut over the ranks by itself.

    A fused QKV weight is one: the parameter is Q, K and V one after the other, a shard is a slice of each.

    Args:
        shape: shape of the parameter.
        sub_dim_sizes: width of each sub-parameter on the axis.
        shard_widths: for each sub-parameter the width of every rank's slice.
        partition_dim: the axis.

    Raises:
        IndexError: an axis that the parameter does not have.
        ValueError: ``shard_widths`` does not give every rank a width in every sub-parameter.

    Example: Q of four rows, K and V of two, over two ranks::

        >>> sub_param_map((8, 3), [4, 2, 2], [[2, 2], [1, 1], [1, 1]], 0).shard_shapes
        {0: (4, 3), 1: (4, 3)}
    """
    shape = sizes(shape, 'shape')
    axis = axis_index(partition_dim, shape, 'partition_dim')
    sub_sizes = widths(sub_dim_sizes, 'sub_dim_sizes')
    rows = [widths(row, f'shard_widths[{index}]') for index, row in enumerate(shard_widths)]
    if not rows or len(rows) != len(sub_sizes) or len(set(map(len, rows))) != 1:
        raise ValueError(f'shard_widths {rows} must have one row for each of the {len(sub_sizes)} sub-parameters and '
                         'one width for each rank in every row.')
    return _side_by_side(shape, axis, sub_sizes, rows, [False] * len(rows), len(rows[0]))


def segmented_map(shape, segments, partition_dim, tp_degree, split_widths):
    """Return the map of a parameter that is a row of segments, each cut over the ranks or held whole by all of them.

    Args:
        shape: shape of the parameter.
        segments: ``(size, replicated)`` pairs in the order of the axis.
        partition_dim: the axis.
        tp_degree: number of ranks.
        split_widths: for each segment that is not replicated, in the same order, the width of every rank's slice. They
            follow head counts and grain sizes, so only the layer that cut the parameter knows them.

    Raises:
        IndexError: an axis that the parameter does not have.
        ValueError: the widths of a segment do not add up to its size, more than 2**24 ranks.

    Example: four query rows cut in two, and two key/value rows that both ranks hold::

        >>> segmented_map((6, 3), [(4, False), (2, True)], 0, 2, [[2, 2]]).shard_shapes
        {0: (4, 3), 1: (4, 3)}
    """
    shape = sizes(shape, 'shape')
    axis = axis_index(partition_dim, shape, 'partition_dim')
    ranks = rank_count(tp_degree, 'tp_degree')
    segments = [(size, bool(replicated)) for size, replicated in segments]
    segment_sizes = widths((size for size, _ in segments), 'the size of segments')
    replicated = [whole for _, whole in segments]
    split_rows = [widths(row, f'split_widths[{index}]') for index, row in enumerate(split_widths)]
    if len(split_rows) != replicated.count(False):
        raise ValueError(f'split_widths has {len(split_rows)} rows, but {replicated.count(False)} of the '
                         f'{len(segments)} segments are split; give one row of widths for each of those.')
    rows = []
    for index, (size, whole) in enumerate(zip(segment_sizes, replicated)):
        row = (size, ) * ranks if whole else split_rows[replicated[:index].count(False)]
        if not whole and (len(row) != ranks or sum(row) != size):
            raise ValueError(f'The split widths {list(row)} of segment {index} do not account for its {size} elements '
                             f'across {ranks} ranks.')
        rows.append(row)
    return _side_by_side(shape, axis, segment_sizes, rows, replicated, ranks)


def block_gather_map(shape, block_ids_by_rank, block_size, partition_dim):
    """Return the map of a parameter of which every rank holds chosen blocks of one size.

    Ids that count up one by one become one piece.

    Args:
        shape: shape of the parameter.
        block_ids_by_rank: mapping from location id to the ids of its blocks, in the order of the shard. Block ``b``
            starts at ``b * block_size`` on the axis.
        block_size: width of a block on the axis.
        partition_dim: the axis.

    Raises:
        IndexError: an axis that the parameter does not have.
        ValueError: a negative id, blocks that no address reaches.

    Example: location 0 holds blocks 0, 1 and 3, so its shard has two pieces::

        >>> len(block_gather_map((8, ), {0: [0, 1, 3], 1: [2]}, 2, 0).pieces_by_rank[0])
        2
    """
    shape = sizes(shape, 'shape')
    axis = axis_index(partition_dim, shape, 'partition_dim')
    width = count(block_size, 'block_size')
    ids = {
        integer(rank, 'a rank of block_ids_by_rank'): widths(blocks, f'block_ids_by_rank[{rank}]')
        for rank, blocks in mapping(block_ids_by_rank, 'block_ids_by_rank').items()
    }
    counts = np.array([len(blocks) for blocks in ids.values()], dtype=np.int64)
    block = np.fromiter(chain.from_iterable(ids.values()), dtype=np.int64, count=int(counts.sum()))
    furthest = max(int(block.max(initial=0)) + 1, int(counts.max(initial=0))) * width
    if furthest > MAX_ELEMENTS:
        raise ValueError(f'Blocks of {width} elements reach to element {furthest} of the axis, beyond 2**62.')
    shard, place = expand_ranges(np.zeros_like(counts), counts)

    starts_run = np.ones(len(block), dtype=bool)
    starts_run[1:] = (block[1:] != block[:-1] + 1) | (shard[1:] != shard[:-1])
    first = np.flatnonzero(starts_run)
    return _axis_map(shape,
                     axis,
                     location_ids=int64_column(list(ids), 'a location id'),
                     shard_width=counts * width,
                     shard=shard[first],
                     source_start=block[first] * width,
                     dest_start=place[first] * width,
                     width=np.diff(first, append=len(block)) * width,
                     holders=shard[first])


def _side_by_side(shape, axis, sizes_on_axis, rows, replicated, ranks):
    """Map of S segments, perhaps none, next to each other on an axis: ``rows[s][t]`` is segment s's width on rank t.

    A replicated segment starts at the same place for all ranks, any other goes on from rank to rank.
    """
    if sum(sizes_on_axis) + sum(map(sum, rows)) > MAX_ELEMENTS:
        raise ValueError(f'The widths on axis {axis} add up to more than 2**62 elements.')
    width = np.array(rows, dtype=np.int64).reshape(len(rows), ranks)
    starts = np.cumsum((0, ) + sizes_on_axis)[:-1]
    whole = np.array(replicated, dtype=bool)
    before = np.where(whole[:, None], 0, np.cumsum(width, axis=1) - width)
    # A single rank that holds a segment whole is the same set of holders as that rank alone.
    holders = np.where(whole[:, None] & (ranks > 1), ranks, np.arange(ranks))
    return _axis_map(shape,
                     axis,
                     location_ids=np.arange(ranks),
                     shard_width=width.sum(axis=0),
                     shard=np.repeat(np.arange(ranks), len(rows)),
                     source_start=(starts[:, None] + before).T.reshape(-1),
                     dest_start=(np.cumsum(width, axis=0) - width).T.reshape(-1),
                     width=width.T.reshape(-1),
                     holders=holders.T.reshape(-1))


def _axis_map(shape, axis, *, location_ids, shard_width, shard, source_start, dest_start, width, holders):
    """Map of blocks that are whole on all axes but one.

    ``location_ids`` and ``shard_width`` have an entry per shard, the others one per piece, in elements of the axis.
    Holder set ``r`` is shard ``r`` alone, and the number after the last shard stands for all of them.
    """
    shards, pieces = len(location_ids), len(shard)
    around = span(shape[:axis] + shape[axis + 1:])
    furthest = max(int(shard_width.max(initial=0)), int((source_start + width).max(initial=0)))
    if furthest * around > MAX_ELEMENTS:
        raise ValueError(f'The blocks on axis {axis} of a parameter of shape {shape} reach beyond 2**62 elements.')
    inner = product(shape[axis + 1:])
    shard_shape = np.tile(np.array(shape, dtype=np.int64), (shards, 1))
    shard_shape[:, axis] = shard_width
    piece_shape = np.tile(np.array(shape, dtype=np.int64), (pieces, 1))
    piece_shape[:, axis] = width
    source_strides = np.tile(np.array(row_major_strides(shape), dtype=np.int64), (pieces, 1))
    dest_strides = source_strides.copy()
    for outer in range(axis):
        dest_strides[:, outer] = shard_width[shard] * (product(shape[outer + 1:axis]) * inner)
    set_starts, set_members = np.arange(shards + 1), np.arange(shards)
    if (holders == shards).any():
        set_starts, set_members = np.append(set_starts, 2 * shards), np.tile(set_members, 2)
    columns = PieceColumns(location_ids=location_ids,
                           shard_ndim=np.full(shards, len(shape)),
                           shard_shape=shard_shape,
                           shard=shard,
                           ndim=np.full(pieces, len(shape)),
                           shape=piece_shape,
                           source_offset=source_start * inner,
                           source_strides=source_strides,
                           dest_offset=dest_start * inner,
                           dest_strides=dest_strides,
                           holders=holders,
                           set_starts=set_starts,
                           set_members=set_members,
                           scale=np.ones(pieces))
    return ParamAffineMap.from_columns(shape, columns)
