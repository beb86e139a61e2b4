# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Several layouts laid over each other: the common refinement of layers of disjoint boxes.

A *layer* is a list of disjoint boxes of the parameter, each with a holder set. Laid over each other,
layers cut the parameter into *cells* that no edge of any box crosses; a cell's holders are those of all
boxes that contain it. Blocks are then cut at the cells, so that each part has one set of holders again.
"""

from dataclasses import dataclass

import numpy as np

from deepspeed.checkpoint.affine.canonical import merge_adjacent
from deepspeed.checkpoint.affine_geometry.columns import expand_ranges, row_ids
from deepspeed.checkpoint.affine_geometry.cover import uncovered
from deepspeed.checkpoint.affine_geometry.join import PairLimitError, overlapping_pairs

# Every part costs some hundred bytes; a map of more is a mistake in the layouts rather than a layout.
_PART_LIMIT = 1 << 24


@dataclass(frozen=True)
class Layer:
    """Disjoint boxes, ``lower`` and ``upper`` int64[A, N], each held by the set ``holders`` int64[A]."""
    lower: np.ndarray
    upper: np.ndarray
    holders: np.ndarray


@dataclass(frozen=True)
class Locations:
    """The locations, shards and holder sets that blocks and layers refer to; fields as in ``PieceColumns``."""
    location_ids: np.ndarray
    shard_ndim: np.ndarray
    shard_shape: np.ndarray
    set_starts: np.ndarray
    set_members: np.ndarray

    @property
    def shard_count(self):
        return len(self.shard_ndim)

    @property
    def shard_ids(self):
        return self.location_ids[:self.shard_count]


def overlay(layers):
    """Cut layers at each other's edges.

    Returns:
        ``(lower, upper, holders)``: disjoint cells int64[C, N] and int64[C, layers], the holder set that each
        layer has there, or -1.
    """
    lower, upper, holders = layers[0].lower, layers[0].upper, layers[0].holders[:, None]
    for layer in layers[1:]:
        cell, box = _meetings(lower, upper, layer.lower, layer.upper)
        low, high = np.maximum(lower[cell], layer.lower[box]), np.minimum(upper[cell], layer.upper[box])
        rest, rest_low, rest_high = _outside(lower, upper, cell, low, high)
        free, free_low, free_high = _outside(layer.lower, layer.upper, box, low, high)
        nothing = np.full(len(rest), -1), np.full((len(free), holders.shape[1]), -1)
        holders = np.concatenate([
            np.column_stack([holders[cell], layer.holders[box]]),
            np.column_stack([holders[rest], nothing[0]]),
            np.column_stack([nothing[1], layer.holders[free]])
        ])
        lower, upper = np.concatenate([low, rest_low, free_low]), np.concatenate([high, rest_high, free_high])
    return lower, upper, holders


def _meetings(lower_a, upper_a, lower_b, upper_b):
    try:
        return overlapping_pairs(lower_a, upper_a, lower_b, upper_b, limit=_PART_LIMIT)
    except PairLimitError as error:
        raise ValueError(f'the layouts cut each other into {error.count} parts, more than the {error.limit} that one '
                         'map is meant to have') from None


def _outside(lower, upper, owner, low, high):
    """What disjoint parts ``low``, ``high`` of boxes ``owner`` leave of all boxes: owner and corners."""
    covered = np.zeros(len(lower), np.int64)
    np.add.at(covered, owner, (high - low).prod(axis=1))
    open_boxes = np.flatnonzero(covered < (upper - lower).prod(axis=1))
    number = np.full(len(lower), -1)
    number[open_boxes] = np.arange(len(open_boxes))
    parts = number[owner] >= 0
    group, free_low, free_high = uncovered(lower[open_boxes], upper[open_boxes], number[owner[parts]], low[parts],
                                           high[parts])
    return open_boxes[group], free_low, free_high


def cut_at_layers(blocks, layers, locations, shape):
    """Cut blocks at the cells of layers, give each part the holders of its cell, and join what may be joined.

    Args:
        blocks: ``Blocks``, each a union of boxes of the layers.
        layers: at least one ``Layer``; its sets, and the blocks' shards, are those of ``locations``.
        shape: the parameter's shape, at least one axis.

    Returns:
        ``(blocks, locations)`` with the holder sets of the result.
    """
    lower, upper, held = overlay(layers)
    cell_set, locations = _united_sets(held, locations)
    block, cell = _meetings(blocks.lower, blocks.upper, lower, upper)
    parts = blocks.cut(block, lower[cell], upper[cell]).with_holders(cell_set[cell])
    return merge_adjacent(parts, shape), locations


def _united_sets(held, locations):
    """One holder set per distinct row of ``held``, the union of the row's sets."""
    ids, first = row_ids(held)
    owners, members = [], []
    for layer in range(held.shape[1]):
        named = held[first, layer]
        known = np.flatnonzero(named >= 0)
        owner, at = expand_ranges(locations.set_starts[named[known]], locations.set_starts[named[known] + 1])
        owners.append(known[owner])
        members.append(locations.set_members[at])
    owner, member = np.concatenate(owners), np.concatenate(members)
    order = np.lexsort((member, owner))
    owner, member = owner[order], member[order]
    fresh = np.ones(len(owner), bool)
    fresh[1:] = (owner[1:] != owner[:-1]) | (member[1:] != member[:-1])
    owner, member = owner[fresh], member[fresh]
    starts = np.searchsorted(owner, np.arange(len(first) + 1))
    return ids, Locations(locations.location_ids, locations.shard_ndim, locations.shard_shape, starts, member)


def join_locations(tables):
    """Put several maps' locations side by side.

    Args:
        tables: ``PieceColumns`` or ``Locations``, with disjoint locations.

    Returns:
        ``(locations, first_shard, first_set)``: what to add to a map's own shard and set numbers, int per map.
    """
    shards = np.cumsum([0] + [table.shard_count for table in tables])
    sets = np.cumsum([0] + [len(table.set_starts) - 1 for table in tables])
    members = np.cumsum([0] + [len(table.set_members) for table in tables])
    width = max((table.shard_shape.shape[1] for table in tables), default=0)
    shapes = [
        np.pad(table.shard_shape, ((0, 0), (0, width - table.shard_shape.shape[1])), constant_values=1)
        for table in tables
    ]
    starts = [table.set_starts[:-1] + first for table, first in zip(tables, members)]
    return Locations(
        location_ids=np.concatenate([table.shard_ids for table in tables]),
        shard_ndim=np.concatenate([table.shard_ndim for table in tables]),
        shard_shape=np.concatenate(shapes),
        set_starts=np.concatenate([*starts, members[-1:]]),
        set_members=np.concatenate([table.set_members + first for table, first in zip(tables, shards)]),
    ), shards[:-1].tolist(), sets[:-1].tolist()
