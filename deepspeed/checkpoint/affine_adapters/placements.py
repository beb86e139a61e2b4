# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of tensors that are laid out over a mesh of ranks by the placements of torch's DTensor.

``Shard(dim)`` cuts an axis as ``torch.chunk`` does: ``ceil(size / n)`` indices for each of the ``n`` ranks along a
mesh dimension, so that the last ones may hold less, or nothing. Several mesh dimensions that cut one axis do so one
after the other, each cutting what the one before left of it. FSDP2 adds its mesh dimension at the left but cuts last,
which placements express by ``_StridedShard(dim, split_factor)``. A split factor says how many parts there already
were: it is the product of the sizes of some mesh dimensions further right that cut the axis earlier. Where a split
factor can be read so, the axis is cut in that order; this is what FSDP2 does and how ``full_tensor`` reads it, for
sizes that do not divide as well. Otherwise (a ``_StridedShard`` without its counterpart) it is what its name says:
``split_factor`` blocks, each cut over the mesh dimension, and a rank holds its part of every block.
"""

import math
from dataclasses import dataclass

import numpy as np

from deepspeed.checkpoint.affine.blocks import Blocks, box_shape
from deepspeed.checkpoint.affine.canonical import canonical_map
from deepspeed.checkpoint.affine.checks import axis_index, integer, listed, mapping, rank_count, sizes
from deepspeed.checkpoint.affine.columns import int64_column
from deepspeed.checkpoint.affine.overlay import Locations


def placement_map(shape, mesh_ranks, placements, *, locations=None):
    """Return the map of a tensor that is laid out over a mesh by DTensor placements.

    No process group is needed, so a planner can describe the layouts of jobs that it is not in.

    Args:
        shape: shape of the whole tensor.
        mesh_ranks: integers, the mesh as an array of its ranks: ``device_mesh.mesh``, a numpy array or nested lists.
        placements: one for each dimension of the mesh: ``Shard``, ``Replicate``, or ``_StridedShard`` as FSDP2 makes
            it on top of tensor parallelism.
        locations: mapping from each rank of the mesh to its location id. Default: the rank.

    Raises:
        IndexError: ``Shard`` of an axis that the tensor does not have.
        TypeError: a placement of an unknown kind, ranks that are no integers.
        ValueError: ``Partial``, another number of placements than of mesh dimensions, a rank that is twice in the mesh
            or has no location, two ranks with one location.

    Example: seven rows cut over the second dimension of a mesh of 2 x 2, and held twice by the first::

        >>> from torch.distributed.tensor import Replicate, Shard
        >>> layout = placement_map((7, 3), [[0, 1], [2, 3]], [Replicate(), Shard(0)])
        >>> layout.shard_shapes
        {0: (4, 3), 1: (3, 3), 2: (4, 3), 3: (3, 3)}
        >>> layout.pieces_by_rank[1][0].locations
        frozenset({1, 3})
    """
    shape = sizes(shape, 'shape')
    ranks = _mesh_array(mesh_ranks)
    cuts = _cuts_by_axis(shape, ranks.shape, list(placements))
    ids = _location_ids(ranks, locations)
    coordinates = np.indices(ranks.shape).reshape(ranks.ndim, ranks.size)
    axes = [_axis_runs(size, ranks.shape, own) for size, own in zip(box_shape(shape), cuts)]
    part = np.stack([_part_of(coordinates, ranks.shape, own) for own in cuts])
    held = np.stack([axis.held[own] for axis, own in zip(axes, part)], axis=1)
    # Ranks that differ on replicated mesh dimensions alone have the same part of every axis.
    same_parts = np.unique(part, axis=1, return_inverse=True)[1].reshape(-1)
    by_set = np.argsort(same_parts, kind='stable')
    table = Locations(location_ids=ids,
                      shard_ndim=np.full(ranks.size, len(shape)),
                      shard_shape=held[:, :len(shape)],
                      set_starts=np.searchsorted(same_parts[by_set], np.arange(same_parts.max() + 2)),
                      set_members=by_set)
    return canonical_map(_blocks(axes, part, held, same_parts), shape, table)


@dataclass(frozen=True)
class _AxisRuns:
    """What is left of one axis after all cuts: for every part its runs of indices.

    Attributes:
        start, length, at: int64[runs], first index in the parameter, number of indices, first index in the shard; by
            part, ascending.
        first: int64[parts + 1], where the runs of each part begin.
        held: int64[parts], indices that it has.
    """
    start: np.ndarray
    length: np.ndarray
    at: np.ndarray
    first: np.ndarray
    held: np.ndarray


def _axis_runs(size, mesh_shape, cuts):
    """Cut an axis of ``size`` indices over mesh dimensions, ``(mesh_dim, split factor)`` in the order of cutting."""
    part, start, length, parts = np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([size]), 1
    for mesh_dim, factor in cuts:
        part, start, length = _cut(part, start, length, parts, mesh_shape[mesh_dim], factor)
        parts *= mesh_shape[mesh_dim]
    part, start, length = _joined(part, start, length)
    first = np.searchsorted(part, np.arange(parts + 1))
    ends = np.append(0, np.cumsum(length))
    return _AxisRuns(start, length, ends[:-1] - ends[first[part]], first, np.diff(ends[first]))


def _part_of(coordinates, mesh_shape, cuts):
    """int64[n], the part of an axis that is held at mesh coordinates, int64[mesh dimensions, n]."""
    part = np.zeros(coordinates.shape[1], np.int64)
    for mesh_dim, _ in cuts:
        part = part * mesh_shape[mesh_dim] + coordinates[mesh_dim]
    return part


def _cut(part, start, length, parts, chunks, factor):
    """Cut every part into ``factor`` blocks and each of these into ``chunks``; chunk i of all blocks is a new part.

    Parts, and blocks and chunks within them, lie on a line one after the other. Cutting that line at the edges of
    both runs and chunks gives the new runs.

    Args:
        part, start, length: int64[runs] as in ``_AxisRuns``; runs may be empty.
    """
    at = np.cumsum(length) - length
    held = np.zeros(parts, np.int64)
    np.add.at(held, part, length)
    block_edges = np.minimum(np.arange(factor + 1) * _ceil_div(held, factor)[:, None], held[:, None])
    block = np.diff(block_edges)
    chunk_start = np.minimum(np.arange(chunks) * _ceil_div(block, chunks)[..., None], block[..., None])
    first = (np.cumsum(held) - held)[:, None, None] + block_edges[:, :-1, None] + chunk_start
    # Of several that begin at one place all but the last are empty.
    edges = np.unique(np.concatenate([first.reshape(-1), at]))
    edges = edges[edges < held.sum()]
    run = np.searchsorted(at, edges, side='right') - 1
    chunk = np.searchsorted(first.reshape(-1), edges, side='right') - 1
    new_part = chunk // (factor * chunks) * chunks + chunk % chunks
    order = np.argsort(new_part, kind='stable')
    return (new_part[order], (start[run] + edges - at[run])[order], np.diff(edges, append=held.sum())[order])


def _ceil_div(count, parts):
    return -(-count // parts)


def _joined(part, start, length):
    """Runs without empty ones, and those that continue each other within a part as one."""
    filled = length > 0
    part, start, length = part[filled], start[filled], length[filled]
    begins = np.ones(len(part), bool)
    begins[1:] = (part[1:] != part[:-1]) | (start[1:] != start[:-1] + length[:-1])
    first = np.flatnonzero(begins)
    return part[first], start[first], np.add.reduceat(length, first) if len(first) else length


def _blocks(axes, part, held, same_parts):
    """The boxes of every shard: each choice of one run from every axis.

    Args:
        part: int64[axes, ranks]. held: int64[ranks, axes]. same_parts: int64[ranks], the holder set of each shard.
    """
    counts = np.stack([np.diff(axis.first)[own] for axis, own in zip(axes, part)])
    shard = np.repeat(np.arange(len(held)), counts.prod(axis=0))
    number = np.arange(len(shard)) - np.searchsorted(shard, shard)
    lower, extent, at = (np.empty((len(shard), len(axes)), np.int64) for _ in range(3))
    for index in reversed(range(len(axes))):
        axis, count = axes[index], counts[index, shard]
        run = axis.first[part[index, shard]] + number % count
        number //= count
        lower[:, index], extent[:, index], at[:, index] = axis.start[run], axis.length[run], axis.at[run]
    strides = np.ones_like(at)
    for index in reversed(range(len(axes) - 1)):
        strides[:, index] = strides[:, index + 1] * held[shard, index + 1]
    return Blocks(piece=np.arange(len(shard)),
                  shard=shard,
                  lower=lower,
                  extent=extent,
                  offset=(at * strides).sum(axis=1),
                  strides=strides,
                  holders=same_parts[shard],
                  scale=np.ones(len(shard)))


def _cuts_by_axis(shape, mesh_shape, placements):
    """For each axis the ``(mesh_dim, split factor)`` that cut it, in the order of cutting."""
    if len(placements) != len(mesh_shape):
        raise ValueError(
            f'There are {len(placements)} placements for a mesh of shape {tuple(mesh_shape)}; give one for '
            f'each of its {len(mesh_shape)} dimensions.')
    kinds = _placement_types()
    cuts = [[] for _ in box_shape(shape)]
    for mesh_dim, placement in enumerate(placements):
        what = f'The placement of mesh dimension {mesh_dim}'
        if isinstance(placement, kinds.Partial):
            raise ValueError(
                f'{what} is {placement!r}: its ranks hold summands (or the like) of every element, and no '
                'rank holds an element. Redistribute the tensor to Replicate() or Shard(dim) there first.')
        # Of a subclass nobody knows what it holds.
        if type(placement) is kinds.Replicate:
            continue
        if type(placement) not in (kinds.Shard, getattr(kinds, '_StridedShard', None)):
            raise TypeError(f'{what} is a {type(placement).__name__}; expected Shard, Replicate or _StridedShard.')
        axis = axis_index(placement.dim, shape, f'{what}: dim')
        factor = rank_count(getattr(placement, 'split_factor', 1), f'{what}: split_factor', least=1)
        cuts[axis].append((mesh_dim, factor))
    return [_cutting_order(own, mesh_shape) for own in cuts]


def _cutting_order(cuts, mesh_shape):
    """Put the cuts of an axis, left to right, into the order that their split factors tell; see above."""
    order = []
    for mesh_dim, factor in reversed(cuts):
        parts_before = [math.prod(mesh_shape[earlier] for earlier in order[:place]) for place in range(len(order) + 1)]
        if factor not in parts_before:
            return cuts
        order.insert(parts_before.index(factor), mesh_dim)
    return [(mesh_dim, 1) for mesh_dim in order]


def _placement_types():
    """torch's module of placements: public from torch 2.5 on."""
    try:
        from torch.distributed.tensor import placement_types
    except ImportError:
        from torch.distributed._tensor import placement_types
    return placement_types


def _mesh_array(mesh_ranks):
    ranks = np.asarray(mesh_ranks)
    if ranks.dtype.kind not in 'iu':
        raise TypeError(f'mesh_ranks must be an array of integers, but its dtype is {ranks.dtype}.')
    found, times = np.unique(ranks, return_counts=True)
    if not len(found) or times.max() > 1:
        twice = f'rank {found[times.argmax()]} twice' if len(found) else 'no rank'
        raise ValueError(f'mesh_ranks of shape {ranks.shape} has {twice}; a mesh names every rank once.')
    return ranks


def _location_ids(ranks, locations):
    """int64[ranks], the location id of each rank of a mesh, in row-major order."""
    own = ranks.reshape(-1).tolist()
    if locations is None:
        return int64_column(own, 'a rank')
    known = mapping(locations, 'locations')
    missing = [rank for rank in own if rank not in known]
    if missing:
        raise ValueError(f'locations has no id for rank {missing[0]}; give one for each rank of the mesh, '
                         f'{listed(own)}.')
    ids = [integer(locations[rank], f'locations[{rank}]') for rank in own]
    if len(set(ids)) < len(ids):
        place = next(place for place, location in enumerate(ids) if location in ids[:place])
        raise ValueError(f'locations gives {ids[place]} to the ranks {own[ids.index(ids[place])]} and {own[place]}; '
                         'every shard needs a location of its own.')
    return int64_column(ids, 'a location id')
