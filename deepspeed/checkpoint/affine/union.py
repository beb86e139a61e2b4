# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One map of a parameter that several layouts hold at once."""

from collections import Counter
from contextlib import contextmanager

from deepspeed.checkpoint.affine.blocks import Blocks, box_shape, parameter_blocks
from deepspeed.checkpoint.affine.canonical import canonical_map
from deepspeed.checkpoint.affine.overlay import Layer, cut_at_layers, join_locations
from deepspeed.checkpoint.affine.param_map import as_map
from deepspeed.checkpoint.affine.regions import held_regions


def union_affine_maps(maps):
    """Describe a parameter that several layouts hold at once.

    Every piece is cut at the edges of every block that any location holds over it, and each part lists all
    locations that hold it. A cut moves offsets and keeps strides, so every shard stores what it did.

    A map says where copies are, not that they are equal. Planner and executor do not compare values; only ``rebuild``
    does. Unite only copies that are current.

    Args:
        maps: ``ParamAffineMap`` of one logical shape with disjoint locations. A map need not cover the
            parameter: what ``keep_locations`` leaves of a layout after a failure is a part, too. Do not describe a
            lost shard by size 0: the others would move up.

    Returns:
        ``ParamAffineMap`` over all locations, in canonical form. The order of the maps does not change who holds
        what.

    Raises:
        ValueError: no maps; different logical shapes; one location in two maps; a piece that is no block of the
            parameter, such as a flat run that wraps into the next row; a map whose ``locations`` are not true.

    Example: a trainer's two ZeRO-3 partitions beside the second of two row shards, known as location 7; the first
    was lost.

    >>> from deepspeed.checkpoint.affine.constructors import contiguous_split_map
    >>> from deepspeed.checkpoint.affine.algebra import keep_locations, relabel
    >>> from deepspeed.checkpoint.affine.partitions import zero3_partition_map
    >>> rows = relabel(contiguous_split_map((4, 2), [3, 1], 0), {0: 6, 1: 7})
    >>> merged = union_affine_maps([zero3_partition_map((4, 2), 2), keep_locations(rows, [7])])
    >>> [(piece.shape, sorted(piece.locations)) for piece in merged.pieces_by_rank[1]]
    [((1, 2), [1]), ((1, 2), [1, 7])]
    """
    maps = list(maps)
    check_parts(maps, 'union_affine_maps')
    logical_shape = maps[0].logical_shape
    different = [number for number, part in enumerate(maps) if part.logical_shape != logical_shape]
    if different:
        raise ValueError(
            f'union_affine_maps: map 0 describes a parameter of shape {logical_shape} and map {different[0]} '
            f'one of shape {maps[different[0]].logical_shape}; they cannot hold the same parameter.')
    locations, first_shard, first_set = join_locations([part.columns for part in maps])
    blocks, layers = [], []
    for number, part in enumerate(maps):
        with naming_part('union_affine_maps', number):
            own = parameter_blocks(part.columns, logical_shape)
            regions = held_regions(part.columns, own, logical_shape)
        blocks.append(own.moved(first_shard[number], first_set[number]))
        layers.append(Layer(regions.lower, regions.upper, regions.holders + first_set[number]))
    shape = box_shape(logical_shape)
    merged, locations = cut_at_layers(Blocks.concatenate(blocks), layers, locations, shape)
    return canonical_map(merged, logical_shape, locations)


def check_parts(maps, operation):
    """Raise unless there is at least one map and no location belongs to two of them."""
    if not maps:
        raise ValueError(f'{operation} needs at least one map.')
    for number, part in enumerate(maps):
        as_map(part, f'{operation}: map {number}')
    check_disjoint_locations([part.columns.shard_ids.tolist() for part in maps], operation)


def check_disjoint_locations(ids_by_part, operation):
    """Raise if a location is in two of several lists."""
    owners = Counter(location for ids in ids_by_part for location in set(ids))
    shared = sorted(location for location, count in owners.items() if count > 1)
    if shared:
        numbers = [number for number, ids in enumerate(ids_by_part) if shared[0] in ids]
        raise ValueError(f'{operation}: location {shared[0]} is in maps {numbers}, but a location is one buffer and '
                         'belongs to one layout. Give each layout its own ids, for instance with location_ids() and '
                         'relabel().')


@contextmanager
def naming_part(operation, number):
    """Say which of several maps a ``ValueError`` is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f'{operation}: map {number}: {error}') from error
