# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Small closed operations on maps, each exact.

Laws, for maps whose pieces are in canonical form::

    permute(permute(m, dims), inverse(dims)) == m
    relabel(relabel(m, {a: b}), {b: a}) == m
    narrow(narrow(m, dim, a, n), dim, b, k) == narrow(m, dim, a + b, k)
    narrow(concat([m0, m1], dim), dim, 0, m0.logical_shape[dim]) holds what m0 holds
    union([keep_locations(m, a), keep_locations(m, b)]) has the holders of m where a and b part its locations

``narrow`` and ``concat`` do not touch shards: after ``narrow`` a shard may hold more than the map describes.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from deepspeed.checkpoint.affine.blocks import Blocks, box_shape, parameter_blocks
from deepspeed.checkpoint.affine.canonical import canonical_map, merge_adjacent
from deepspeed.checkpoint.affine.checks import axis_index, integer, listed, mapping
from deepspeed.checkpoint.affine.columns import int64_column
from deepspeed.checkpoint.affine.overlay import join_locations
from deepspeed.checkpoint.affine.param_map import ParamAffineMap, as_map
from deepspeed.checkpoint.affine.regions import held_regions
from deepspeed.checkpoint.affine.union import check_parts, naming_part


def concat_affine_maps(maps, dim):
    """See several parameters, each with its own map, as one parameter concatenated along an axis.

    A trainer's separate q, k and v are a server's fused QKV. They are different buffers, so their maps must have
    disjoint locations; ``location_ids`` makes such ids from labels.

    Args:
        maps: ``ParamAffineMap`` whose logical shapes agree except on ``dim``.
        dim: axis to concatenate along; negative counts from the end.

    Raises:
        IndexError: an axis that the parameters do not have, as scalars have none.
        ValueError: no maps, one location in two maps, shapes that do not fit, a piece that is no block.

    >>> from deepspeed.checkpoint.affine.constructors import replicated_map
    >>> fused = concat_affine_maps([replicated_map((2, 3), 1), relabel(replicated_map((4, 3), 1), {0: 1})], 0)
    >>> fused.logical_shape, fused.pieces_by_rank[1][0].source_offset
    ((6, 3), 6)
    """
    maps = list(maps)
    check_parts(maps, 'concat_affine_maps')
    first = maps[0].logical_shape
    axis = axis_index(dim, first, 'concat_affine_maps: dim')
    for number, part in enumerate(maps):
        shape = part.logical_shape
        if len(shape) != len(first) or shape[:axis] + shape[axis + 1:] != first[:axis] + first[axis + 1:]:
            raise ValueError(
                f'concat_affine_maps: map {number} describes a parameter of shape {shape}, which does not '
                f'continue one of shape {first} along axis {axis}.')
    locations, first_shard, first_set = join_locations([part.columns for part in maps])
    blocks, start = [], 0
    for number, part in enumerate(maps):
        with naming_part('concat_affine_maps', number):
            own = parameter_blocks(part.columns, part.logical_shape)
            held_regions(part.columns, own, part.logical_shape)
        lower = own.lower.copy()
        lower[:, axis] += start
        blocks.append(replace(own, lower=lower).moved(first_shard[number], first_set[number]))
        start += part.logical_shape[axis]
    logical_shape = (*first[:axis], start, *first[axis + 1:])
    return canonical_map(merge_adjacent(Blocks.concatenate(blocks), logical_shape), logical_shape, locations)


def narrow(affine_map, dim, start, length):
    """The part of a parameter with indices ``start`` to ``start + length`` on an axis, like ``torch.narrow``.

    Shards stay as they are and may hold more than the result describes. Such a map can be read from; as the target
    of a plan it needs ``partial_targets=True``.

    Raises:
        IndexError: an axis that the parameter does not have.
        ValueError: a range that the axis does not have, a piece that is no block.

    >>> from deepspeed.checkpoint.affine.constructors import contiguous_split_map
    >>> part = narrow(contiguous_split_map((4, 2), [2, 2], 0), 0, 1, 2)
    >>> [[piece.dest_offset for piece in pieces] for pieces in part.pieces_by_rank.values()]
    [[2], [0]]
    """
    shape = as_map(affine_map, 'narrow: affine_map').logical_shape
    axis = axis_index(dim, shape, 'narrow: dim')
    start, length = integer(start, 'narrow: start'), integer(length, 'narrow: length')
    if start < 0 or length < 0 or start + length > shape[axis]:
        raise ValueError(f'narrow: indices {start} to {start + length} are not within axis {axis} of a parameter of '
                         f'shape {shape}.')
    blocks = parameter_blocks(affine_map.columns, shape)
    lower, upper = blocks.lower.copy(), blocks.upper
    lower[:, axis] = np.maximum(lower[:, axis], start)
    upper[:, axis] = np.minimum(upper[:, axis], start + length)
    rows = np.flatnonzero(lower[:, axis] < upper[:, axis])
    cut = blocks.cut(rows, lower[rows], upper[rows])
    moved = cut.lower.copy()
    moved[:, axis] -= start
    logical_shape = (*shape[:axis], length, *shape[axis + 1:])
    merged = merge_adjacent(replace(cut, lower=moved), logical_shape)
    return canonical_map(merged, logical_shape, affine_map.columns)


def permute(affine_map, dims):
    """The parameter with its axes in another order, like ``torch.permute``; shards stay as they are.

    Raises:
        IndexError: an axis that the parameter does not have.
        ValueError: ``dims`` is no order of the parameter's axes, a piece that is no block.

    >>> from deepspeed.checkpoint.affine.constructors import contiguous_split_map
    >>> flipped = permute(contiguous_split_map((4, 2), [2, 2], 0), (1, 0))
    >>> flipped.logical_shape, flipped.pieces_by_rank[0][0].dest_strides
    ((2, 4), (1, 2))
    """
    shape = as_map(affine_map, 'permute: affine_map').logical_shape
    axes = [axis_index(dim, shape, f'permute: dims[{index}]') for index, dim in enumerate(dims)]
    if sorted(axes) != list(range(len(shape))):
        raise ValueError(
            f'permute: {tuple(dims)} is no order of the {len(shape)} axes of a parameter of shape {shape}.')
    blocks = parameter_blocks(affine_map.columns, shape)
    if axes:
        blocks = replace(blocks,
                         lower=blocks.lower[:, axes],
                         extent=blocks.extent[:, axes],
                         strides=blocks.strides[:, axes])
    logical_shape = tuple(shape[axis] for axis in axes)
    return canonical_map(merge_adjacent(blocks, box_shape(logical_shape)), logical_shape, affine_map.columns)


def relabel(affine_map, new_ids):
    """The same layout under other location ids; all columns but the ids are shared.

    Args:
        new_ids: mapping from old to new id. Locations that it does not name keep theirs.

    Raises:
        ValueError: an old id that the map does not have, or two locations that would have one id.

    >>> from deepspeed.checkpoint.affine.constructors import replicated_map
    >>> list(relabel(replicated_map((4, ), 2), {1: 5}).shard_shapes)
    [0, 5]
    """
    columns = as_map(affine_map, 'relabel: affine_map').columns
    new_ids = {
        integer(old, 'relabel: an old id'): integer(new, 'relabel: a new id')
        for old, new in mapping(new_ids, 'relabel: new_ids').items()
    }
    old_ids = columns.location_ids.tolist()
    unknown = sorted(set(new_ids).difference(old_ids))
    if unknown:
        raise ValueError(f'relabel: the map has no location {unknown[0]}; it has {listed(sorted(old_ids))}.')
    ids = [new_ids.get(old, old) for old in old_ids]
    if len(set(ids)) < len(ids):
        raise ValueError(f'relabel: two locations would both be {Counter(ids).most_common(1)[0][0]}.')
    return ParamAffineMap.from_columns(affine_map.logical_shape,
                                       columns.with_location_ids(int64_column(ids, 'a location id')))


def keep_locations(affine_map, locations):
    """Only some of the shards of a layout: those that survived, those that one process can reach.

    The pieces stay where they are in the parameter; the other locations hold nothing any more. To describe a lost
    shard by size 0 in a constructor would move the shards after it.

    Args:
        locations: ids of the shards that are kept.

    Raises:
        ValueError: an id that has no shard in the map.

    >>> from deepspeed.checkpoint.affine.constructors import contiguous_split_map
    >>> survivors = keep_locations(contiguous_split_map((6, 2), [2, 2, 2], 0), [0, 2])
    >>> {rank: pieces[0].source_offset for rank, pieces in survivors.pieces_by_rank.items()}
    {0: 0, 2: 8}
    """
    columns = affine_map.columns
    wanted = {integer(location, 'keep_locations: a location') for location in locations}
    unknown = sorted(wanted.difference(columns.shard_ids.tolist()))
    if unknown:
        raise ValueError(f'keep_locations: the map has no shard at location {unknown[0]}; it has shards of '
                         f'{listed(sorted(columns.shard_ids.tolist()))}.')
    kept = np.flatnonzero(np.isin(columns.shard_ids, sorted(wanted)))
    number = np.full(len(columns.location_ids), -1)
    number[kept] = np.arange(len(kept))
    rows = np.flatnonzero(number[columns.shard] >= 0)
    holders, starts, members = _kept_sets(columns, number)
    return ParamAffineMap.from_columns(
        affine_map.logical_shape,
        replace(columns,
                location_ids=columns.location_ids[kept],
                shard_ndim=columns.shard_ndim[kept],
                shard_shape=columns.shard_shape[kept],
                shard=number[columns.shard[rows]],
                holders=holders[columns.holders[rows]],
                set_starts=starts,
                set_members=members,
                **{
                    name: getattr(columns, name)[rows]
                    for name in ('ndim', 'shape', 'source_offset', 'source_strides', 'dest_offset', 'dest_strides',
                                 'scale')
                }))


def _kept_sets(columns, number):
    """Holder sets without the locations that have no new number: the new set of each old one, starts and members."""
    owner = np.repeat(np.arange(len(columns.set_starts) - 1), np.diff(columns.set_starts))
    member = number[columns.set_members]
    owner, member = owner[member >= 0], member[member >= 0]
    distinct = {}
    bounds = np.searchsorted(owner, np.arange(len(columns.set_starts))).tolist()
    sets = [tuple(member[start:stop].tolist()) for start, stop in zip(bounds, bounds[1:])]
    holders = np.array([distinct.setdefault(members, len(distinct)) for members in sets], np.int64)
    starts = np.cumsum([0, *(len(members) for members in distinct)])
    return holders, starts, np.array([index for members in distinct for index in members], np.int64)
