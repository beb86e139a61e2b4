# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Who holds what: disjoint regions of a parameter, each with one set of holders.

The pieces of a map claim holders in ``locations``. Here the claim is proved against where the pieces are,
by sorting, and the pieces are brought down to regions that no block of any holder crosses. Where all
holders of a set store it in the same blocks, which is the rule, regions are just the distinct blocks.
"""

from dataclasses import dataclass

import numpy as np

from deepspeed.checkpoint.affine.blocks import HoldersError, box_shape, describe_piece
from deepspeed.checkpoint.affine_geometry.columns import expand_ranges, row_ids
from deepspeed.checkpoint.affine_geometry.cover import find_overlap, unbalanced_groups, uncovered
from deepspeed.checkpoint.affine_geometry.join import PairLimitError, overlapping_pairs
from deepspeed.checkpoint.affine_geometry.strides import product, row_major_strides

# How many meetings of differently cut replicas are followed up before a map is called tangled.
_MEETING_LIMIT = 1 << 24
# Disjoint blocks meet only themselves; this many more meetings are looked at to name two that overlap.
_OVERLAP_LIMIT = 1 << 20


@dataclass(frozen=True)
class HeldRegions:
    """A disjoint boxes, and which blocks contain each.

    Attributes:
        lower, upper: int64[A, N]. holders: int64[A], index of the set of locations that hold the region.
        starts, blocks: int64[A + 1], int64[sum]: region k lies within each of the blocks
            ``blocks[starts[k]:starts[k + 1]]``, one per holder, ascending by location id.
    """
    lower: np.ndarray
    upper: np.ndarray
    holders: np.ndarray
    starts: np.ndarray
    blocks: np.ndarray

    @property
    def volume(self):
        """Number of elements in all regions together."""
        return int((self.upper - self.lower).prod(axis=1).sum())


def held_regions(columns, blocks, logical_shape):
    """Prove the holders of a map's blocks and cut them to regions that no block crosses.

    Raises:
        HoldersError: a piece names a location that does not hold all of it, or does not name one that holds
            some of it, or a shard holds an element twice.
        PairLimitError: replicas cut in so many different ways that the cuts cannot be counted.
    """
    ids, first = row_ids(blocks.lower, blocks.extent)
    distinct, place = blocks.take(first), place_in_set(columns, blocks)
    if _same_blocks_everywhere(columns, blocks, ids, first, place) and _disjoint(distinct, logical_shape):
        order = np.lexsort((columns.location_ids[blocks.shard], ids))
        starts = np.searchsorted(ids[order], np.arange(len(first) + 1))
        return HeldRegions(distinct.lower, distinct.upper, distinct.holders, starts, order)
    return _differently_cut(columns, blocks, logical_shape, place)


def covers(regions, logical_shape):
    """Whether disjoint regions hold every element of the parameter."""
    return regions.volume == product(logical_shape)


def count_uncovered(boxes, logical_shape):
    """How many elements no box holds, and the lowest flat offset among them: ``(count, offset)``, or ``(0, None)``.

    Args:
        boxes: anything with ``lower`` and ``upper``: ``HeldRegions`` or ``Blocks``.
    """
    lower, upper = uncovered_boxes(boxes.lower, boxes.upper, logical_shape)
    if not len(lower):
        return 0, None
    strides = np.array(row_major_strides(box_shape(logical_shape)), np.int64)
    return int((upper - lower).prod(axis=1).sum()), int((lower @ strides).min())


def uncovered_boxes(lower, upper, logical_shape):
    """Disjoint boxes ``(lower, upper)`` of what the given boxes leave free of the parameter."""
    shape = np.array(box_shape(logical_shape), np.int64)
    if not shape.all():
        return np.zeros((0, len(shape)), np.int64), np.zeros((0, len(shape)), np.int64)
    group = np.zeros(len(lower), np.int64)
    return uncovered(np.zeros((1, len(shape)), np.int64), shape[None], group, lower, upper)[1:]


def _same_blocks_everywhere(columns, blocks, ids, first, place):
    """Whether every distinct block is listed by exactly the locations that it names, once by each."""
    copies = np.bincount(ids, minlength=len(first))
    named = np.diff(columns.set_starts)[blocks.holders]
    if (blocks.holders != blocks.holders[first][ids]).any() or (copies[ids] != named).any():
        return False
    return len(row_ids(ids, blocks.shard)[1]) == len(ids) and not (place < 0).any()


def place_in_set(columns, blocks):
    """Where in ``set_members`` each block's own shard stands within the block's holder set, or -1.

    Args:
        blocks: anything with ``shard`` and ``holders``: ``Blocks``, or the ``PieceColumns`` themselves.
    """
    sets = np.repeat(np.arange(len(columns.set_starts) - 1), np.diff(columns.set_starts))
    width = len(columns.location_ids)
    # Sets are numbered and their members ascend, so these keys are sorted as they stand.
    known, wanted = sets * width + columns.set_members, blocks.holders * width + blocks.shard
    at = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
    return np.where(known[at] == wanted, at, -1) if len(known) else np.full(len(wanted), -1)


def _disjoint(blocks, logical_shape):
    """Whether blocks are disjoint: by an exact cover where their volume fills the parameter, else by joining."""
    if not len(blocks.shard):
        return True
    shape = np.array(box_shape(logical_shape), np.int64)
    if int(blocks.extent.prod(axis=1).sum()) == product(shape):
        lower = np.concatenate([blocks.lower, np.zeros((1, len(shape)), np.int64)])
        upper = np.concatenate([blocks.upper, shape[None]])
        weight = np.ones(len(lower), np.int64)
        weight[-1] = -1
        return not len(unbalanced_groups(np.zeros(len(lower), np.int64), lower, upper, weight))
    try:
        return find_overlap(blocks.lower, blocks.upper, limit=_OVERLAP_LIMIT + len(blocks.shard)) is None
    except PairLimitError:
        return False


def _differently_cut(columns, blocks, logical_shape, place):
    """Regions of a map whose holders store the same elements in different blocks.

    All holders of one set must cover the same elements, each once: their boxes balance. Then one holder per set
    stands for the set, and the sets must be disjoint.
    """
    stranger = np.flatnonzero(place < 0)
    if len(stranger):
        _raise(columns, blocks, int(stranger[0]), 'whose own shard is not among them')
    leads = np.flatnonzero(place == columns.set_starts[blocks.holders])
    _check_followers(columns, blocks, leads, place)
    if not _disjoint(blocks.take(leads), logical_shape):
        _raise_overlap(columns, blocks, leads)
    return _cut_by_followers(columns, blocks, leads, place)


def _raise_overlap(columns, blocks, leads):
    """Name two pieces of different holder sets, or of one shard, that hold the same elements."""
    try:
        pair = find_overlap(blocks.lower[leads], blocks.upper[leads], limit=_OVERLAP_LIMIT + len(leads))
    except PairLimitError as error:
        raise HoldersError(f'pieces overlap {error.count - len(leads)} times without naming each other\'s locations: '
                           'the map has different locations for the same elements.') from None
    one, other = leads[pair[0]], leads[pair[1]]
    if blocks.shard[one] == blocks.shard[other]:
        raise HoldersError(f'{describe_piece(columns, int(blocks.piece[one]))} and '
                           f'{describe_piece(columns, int(blocks.piece[other]))} hold overlapping parts of the '
                           'parameter: a shard holds an element once.')
    _raise(columns, blocks, int(one), f'but {describe_piece(columns, int(blocks.piece[other]))} overlaps it')


def _check_followers(columns, blocks, leads, place):
    """Prove that every holder of a set covers exactly the elements that the first holder of the set covers."""
    # One group per (set, follower): the follower's blocks count +1, a copy of the leader's -1.
    follower = np.flatnonzero(place != columns.set_starts[blocks.holders])
    held = blocks.holders[leads]
    copy, member = expand_ranges(columns.set_starts[held] + 1, columns.set_starts[held + 1])
    rows = np.concatenate([follower, leads[copy]])
    weight = np.concatenate([np.ones(len(follower), np.int64), np.full(len(copy), -1)])
    group = np.concatenate([place[follower], member])
    wrong = unbalanced_groups(group, blocks.lower[rows], blocks.upper[rows], weight)
    if len(wrong):
        named = int(np.searchsorted(columns.set_starts, wrong[0], 'right')) - 1
        row = int(np.flatnonzero(blocks.holders == named)[0])
        rank = int(columns.location_ids[columns.set_members[wrong[0]]])
        _raise(columns, blocks, row, f'but rank {rank} does not hold exactly the elements that the others hold')


def _cut_by_followers(columns, blocks, leads, place):
    """Cut the leaders' blocks wherever another holder of the same set has an edge."""
    ids, first = row_ids(blocks.lower, blocks.extent)
    known = np.zeros(len(first), bool)
    known[ids[leads]] = True
    turns = place - columns.set_starts[blocks.holders]
    lower, upper, holders = blocks.lower[leads], blocks.upper[leads], blocks.holders[leads]
    odd = np.flatnonzero(~known[ids])
    for turn in np.unique(turns[odd]):
        # One holder's blocks are disjoint and fill the regions they meet, so meetings replace those regions.
        cut = odd[turns[odd] == turn]
        region, by = overlapping_pairs(lower, upper, blocks.lower[cut], blocks.upper[cut], limit=_MEETING_LIMIT)
        whole = np.ones(len(lower), bool)
        whole[region] = False
        holders = np.concatenate([holders[whole], holders[region]])
        part_lower = np.maximum(lower[region], blocks.lower[cut][by])
        part_upper = np.minimum(upper[region], blocks.upper[cut][by])
        lower, upper = np.concatenate([lower[whole], part_lower]), np.concatenate([upper[whole], part_upper])
    region, block = overlapping_pairs(lower, upper, blocks.lower, blocks.upper, limit=_MEETING_LIMIT)
    order = np.lexsort((columns.location_ids[blocks.shard[block]], region))
    starts = np.searchsorted(region[order], np.arange(len(lower) + 1))
    return HeldRegions(lower, upper, holders, starts, block[order])


def _raise(columns, blocks, row, what):
    named = sorted(columns.holder_ids(int(blocks.holders[row])))
    raise HoldersError(f'{describe_piece(columns, int(blocks.piece[row]))} says that it is held by {named}, {what}: '
                       'the map has different locations for the same elements.')
