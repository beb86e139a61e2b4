# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of parameters that were flattened and cut into runs: ZeRO-3 partitions and flat parameters."""

from collections import Counter
from itertools import chain

import numpy as np

from deepspeed.checkpoint.affine.checks import integers, rank_count, sizes
from deepspeed.checkpoint.affine.columns import PieceColumns, int64_column
from deepspeed.checkpoint.affine.param_map import ParamAffineMap
from deepspeed.checkpoint.affine_geometry.runs import lower_runs
from deepspeed.checkpoint.affine_geometry.strides import product, row_major_strides


def zero3_partition_map(shape, world_size, *, locations=None):
    """Return the map of a ZeRO-3 parameter: flattened in row-major order and cut into equal runs.

    Rank ``r`` holds elements ``[r * c, (r + 1) * c)`` with ``c = ceil(numel / world_size)``. At the end of the
    parameter the last ranks hold less, or nothing. ZeRO-3 pads their buffers; padding is no part of the map, so pass
    ``ds_tensor.narrow(0, 0, n)`` with the ``n`` elements that the map describes. A shard has one axis.

    Args:
        shape: shape of the parameter.
        world_size: number of ranks that a copy of the parameter is cut over, W.
        locations: the location id of each rank, W of them; or one such sequence for each group of ranks that holds a
            whole copy (hpZ). Default: 0 to W - 1.

    Raises:
        ValueError: sizes that cannot be, no ranks or more than 2**24, locations of another number or with duplicates.

    Example: ten elements over four ranks, and over two groups of two::

        >>> zero3_partition_map((2, 5), 4).shard_shapes
        {0: (3,), 1: (3,), 2: (3,), 3: (1,)}
        >>> zero3_partition_map((2, 5), 2, locations=[[0, 1], [2, 3]]).pieces_by_rank[2][0].locations
        frozenset({0, 2})
    """
    shape = sizes(shape, 'shape')
    world_size = rank_count(world_size, 'world_size', least=1)
    numel = product(shape)
    per_rank = -(-numel // world_size)
    groups = _location_groups(locations, world_size, 'world_size')
    # Clipped before multiplying: a huge world of empty ranks must not wrap.
    edges = np.minimum(np.arange(world_size + 1), -(-numel // max(per_rank, 1))) * per_rank
    edges = np.minimum(edges, numel)
    return _runs_map(shape, edges[:-1], edges[1:], np.arange(world_size), groups)


def flat_partition_map(shape, bounds, *, locations=None):
    """Return the map of a parameter that was flattened in row-major order and cut at given bounds.

    Runs may be uneven, empty and in any order. Equal runs are replicas of each other. Runs need not reach over the
    whole parameter. A shard has one axis, as many elements as its run, and the run's first element first.

    Args:
        shape: shape of the parameter.
        bounds: ``(start, stop)`` for each shard, elements of the flat parameter.
        locations: the location id of each shard, one for each of ``bounds``; or one such sequence for each group that
            holds a copy. Default: 0, 1, 2, ...

    Raises:
        ValueError: bounds outside the parameter, runs that overlap in part, locations of another number or with
            duplicates.

    Example::

        >>> flat_partition_map((2, 5), [(0, 7), (7, 10)]).shard_shapes
        {0: (7,), 1: (3,)}
    """
    shape = sizes(shape, 'shape')
    runs = [integers(run, f'bounds[{index}]') for index, run in enumerate(bounds)]
    numel = product(shape)
    for index, run in enumerate(runs):
        if len(run) != 2 or not 0 <= run[0] <= run[1] <= numel:
            raise ValueError(f'bounds[{index}] is {run}; it must be (start, stop) with 0 <= start <= stop <= {numel}, '
                             f'the elements of a parameter of shape {shape}.')
    starts, stops = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    groups = _location_groups(locations, len(runs), 'bounds')
    return _runs_map(shape, starts, stops, _replica_sets(starts, stops), groups)


def _replica_sets(starts, stops):
    """int64[n], one number for equal runs and another for different ones; empty runs count by their place too."""
    runs, first, same_as = np.unique(np.stack([starts, stops], axis=1), axis=0, return_index=True, return_inverse=True)
    held = np.flatnonzero(runs[:, 1] > runs[:, 0])
    overlapping = np.flatnonzero(runs[held[1:], 0] < runs[held[:-1], 1])
    if len(overlapping):
        one, other = first[held[overlapping[0]]], first[held[overlapping[0] + 1]]
        raise ValueError(f'bounds[{one}] = ({starts[one]}, {stops[one]}) and bounds[{other}] = ({starts[other]}, '
                         f'{stops[other]}) overlap in part, so some of their elements have other holders than the '
                         'rest. Build one map for each of the two and join them with union_affine_maps.')
    return same_as.reshape(-1)


def _location_groups(locations, count, what):
    """Return ``locations`` as int64[G, count], one row per group of ranks that holds a copy."""
    if locations is None:
        return np.arange(count).reshape(1, count)
    groups = list(locations)
    if not groups or not hasattr(groups[0], '__len__'):
        groups = [groups]
    rows = [integers(group, f'locations[{index}]') for index, group in enumerate(groups)]
    for index, row in enumerate(rows):
        if len(row) != count:
            raise ValueError(f'Group {index} of locations has {len(row)} ids, but {what} needs {count}.')
    ids = list(chain.from_iterable(rows))
    if len(set(ids)) != len(ids):
        raise ValueError(f'Location {Counter(ids).most_common(1)[0][0]} is given twice; every shard needs a '
                         'location of its own.')
    return int64_column(rows, 'a location id')


def _runs_map(shape, starts, stops, replica_set, groups):
    """Map of W flat runs, each held by one location of every group (int64[G, W]).

    Runs with equal ``replica_set`` are the same elements. A box of a run keeps the parameter's strides in the shard: a
    dense run of the parameter is the same dense run there, only that it starts at zero.
    """
    copies, runs = groups.shape
    strides = row_major_strides(shape)
    run, lower, extent = lower_runs(shape, starts, stops)
    source_offset = lower @ np.array(strides, dtype=np.int64)
    pieces = len(run)
    set_of_member = np.tile(replica_set, copies)
    set_members = np.argsort(set_of_member, kind='stable')
    set_count = int(replica_set.max(initial=-1)) + 1
    columns = PieceColumns(location_ids=groups.reshape(-1),
                           shard_ndim=np.ones(copies * runs),
                           shard_shape=np.tile(stops - starts, copies)[:, None],
                           shard=(np.arange(copies)[:, None] * runs + run).reshape(-1),
                           ndim=np.full(copies * pieces, len(shape)),
                           shape=np.tile(extent, (copies, 1)),
                           source_offset=np.tile(source_offset, copies),
                           source_strides=np.tile(strides, (copies * pieces, 1)),
                           dest_offset=np.tile(source_offset - starts[run], copies),
                           dest_strides=np.tile(strides, (copies * pieces, 1)),
                           holders=np.tile(replica_set[run], copies),
                           set_starts=np.searchsorted(set_of_member[set_members], np.arange(set_count + 1)),
                           set_members=set_members,
                           scale=np.ones(copies * pieces))
    return ParamAffineMap.from_columns(shape, columns)
