# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Small idioms over int64 columns that the other modules of this package share."""

import numpy as np

# Keys stay below this, so that sums and products of two of them are checked before they can overflow.
KEY_LIMIT = 2**62


def expand_ranges(starts, stops):
    """Every integer of many ranges, and which range it came from.

    Args:
        starts, stops: int64[n]; ranges with ``stop <= start`` are empty.

    Returns:
        ``(owner, value)``: two int64[m].

    >>> owner, value = expand_ranges(np.array([3, 9]), np.array([5, 10]))
    >>> owner.tolist(), value.tolist()
    ([0, 0, 1], [3, 4, 9])
    """
    counts = np.maximum(stops - starts, 0)
    owner = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) + (starts - before)[owner]


def row_ids(*columns):
    """Number the distinct rows of a table: equal rows get equal ids, in lexicographic order.

    Args:
        columns: int64[n] or int64[n, k] each, all of n rows.

    Returns:
        ``(ids, first)``: int64[n] ids from 0, and int64[number of ids], the first row that has each id.

    >>> ids, first = row_ids(np.array([5, 4, 5]))
    >>> ids.tolist(), first.tolist()
    ([1, 0, 1], [1, 0])
    """
    flat = [column for block in columns for column in (block.T if block.ndim == 2 else [block])]
    varying = [column for column in flat if len(column) and column.min() != column.max()]
    count = len(flat[0])
    if not varying:
        return np.zeros(count, np.int64), np.zeros(min(count, 1), np.int64)
    order = np.lexsort(varying[::-1])
    changes = np.zeros(count, bool)
    for column in varying:
        ordered = column[order]
        changes[1:] |= ordered[1:] != ordered[:-1]
    ids = np.empty(count, np.int64)
    ids[order] = np.cumsum(changes)
    changes[0] = True
    return ids, order[changes]


def grouped_keys(*pairs):
    """Fold group ids into coordinates, so that coordinates of different groups never meet.

    Args:
        pairs: ``(group, coordinate)`` pairs of int64[n], groups not negative, all on one axis.

    Returns:
        A list with one int64 array per pair, ordered by group first and by coordinate within a group.

    >>> low, high = grouped_keys((np.array([0, 1]), np.array([7, 0])), (np.array([0, 1]), np.array([9, 4])))
    >>> bool(high[0] < low[1])
    True
    """
    filled = [(group, coordinate) for group, coordinate in pairs if len(coordinate)]
    if not filled:
        return [coordinate for _, coordinate in pairs]
    low = min(int(coordinate.min()) for _, coordinate in filled)
    span = max(int(coordinate.max()) for _, coordinate in filled) - low + 1
    groups = max(int(group.max()) for group, _ in filled) + 1
    if groups * span < KEY_LIMIT:
        return [group * span + (coordinate - low) for group, coordinate in pairs]
    # Far coordinates in many groups: only their order matters, so their ranks will do.
    ranks = np.unique(np.concatenate([coordinate for _, coordinate in filled]))
    return [group * len(ranks) + np.searchsorted(ranks, coordinate) for group, coordinate in pairs]
