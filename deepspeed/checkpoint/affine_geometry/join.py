# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which boxes of one list meet which boxes of another, by sorting instead of comparing pairs.

Boxes are joined one axis at a time, over their *distinct* intervals on that axis: real layouts cut a
parameter at few places, so thousands of boxes share a handful of intervals, and only the members of
intervals that do meet are carried on to the next axis.
"""

import numpy as np

from deepspeed.checkpoint.affine_geometry.columns import expand_ranges, grouped_keys, row_ids

# Intermediate lists up to this length are never worth refusing, whatever the limit on the result.
_ALWAYS_ALLOWED = 1 << 20


class PairLimitError(ValueError):
    """More pairs of boxes meet than the caller allows."""

    def __init__(self, count, limit):
        super().__init__(f'{count} pairs of boxes meet, more than the {limit} allowed.')
        self.count = count
        self.limit = limit


def overlapping_pairs(lower_a, upper_a, lower_b, upper_b, group_a=None, group_b=None, limit=None):
    """All pairs ``(i, j)`` where box i of a and box j of b have a coordinate in common.

    Args:
        lower_a, upper_a: int64[n, N], no box empty. lower_b, upper_b: int64[m, N].
        group_a, group_b: int64[n], int64[m]; boxes of different groups never meet. Default: one group.
        limit: the largest number of pairs to return.

    Returns:
        ``(i, j)``: two int64[k].

    Raises:
        PairLimitError: more than ``limit`` pairs.

    >>> rows, cols = np.array([[0, 0], [2, 0]]), np.array([[0, 0], [0, 3]])
    >>> i, j = overlapping_pairs(rows, rows + [2, 6], cols, cols + [4, 3])
    >>> sorted(zip(i.tolist(), j.tolist()))
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    limit = np.iinfo(np.int64).max if limit is None else limit
    a, b = np.arange(len(lower_a)), np.arange(len(lower_b))
    group_a = np.zeros(len(a), np.int64) if group_a is None else group_a
    group_b = np.zeros(len(b), np.int64) if group_b is None else group_b
    if len(a) == 0 or len(b) == 0:
        return a[:0], b[:0]

    axes = [axis for axis in range(lower_a.shape[1]) if _separates(axis, lower_a, upper_a, lower_b, upper_b)]
    while len(axes) > 1:
        joins = [_IntervalJoin(axis, lower_a, upper_a, lower_b, upper_b, a, b, group_a, group_b) for axis in axes]
        join = min(joins, key=lambda candidate: candidate.cost)
        axes.remove(join.axis)
        _check(join.cost, max(limit, _ALWAYS_ALLOWED))
        i, j = join.pairs()
        if join.all_distinct:
            # Every pair is a group of its own, so the axes that are left only filter.
            i, j = a[i], b[j]
            meets = np.ones(len(i), bool)
            for axis in axes:
                meets &= (lower_a[i, axis] < upper_b[j, axis]) & (lower_b[j, axis] < upper_a[i, axis])
            _check(int(np.count_nonzero(meets)), limit)
            return i[meets], j[meets]
        a, b, group_a, group_b = join.members(a, b, i, j)
    if not axes:
        # No axis can tell the boxes apart: within a group all of them meet. An axis of one interval says so.
        lower_a = lower_b = np.zeros((max(len(lower_a), len(lower_b)), 1), np.int64)
        upper_a = upper_b = lower_a + 1
        axes = [0]
    join = _IntervalJoin(axes[0], lower_a, upper_a, lower_b, upper_b, a, b, group_a, group_b, distinct=False)
    _check(join.count, limit)
    i, j = join.pairs()
    return a[i], b[j]


def _separates(axis, lower_a, upper_a, lower_b, upper_b):
    """Whether this axis alone can keep any a apart from any b."""
    return (lower_a[:, axis].max() >= upper_b[:, axis].min()) or (lower_b[:, axis].max() >= upper_a[:, axis].min())


def _check(count, limit):
    if count > limit:
        raise PairLimitError(count, limit)


class _IntervalJoin:
    """The join of the (distinct) intervals of two lists of boxes on one axis, counted before it is made."""

    def __init__(self, axis, lower_a, upper_a, lower_b, upper_b, a, b, group_a, group_b, distinct=True):
        self.axis = axis
        low_a, high_a, low_b, high_b = grouped_keys((group_a, lower_a[a, axis]), (group_a, upper_a[a, axis]),
                                                    (group_b, lower_b[b, axis]), (group_b, upper_b[b, axis]))
        self.id_a = self.id_b = None
        self.all_distinct = not distinct
        if distinct:
            self.id_a, first_a = row_ids(low_a, high_a)
            self.id_b, first_b = row_ids(low_b, high_b)
            self.all_distinct = len(first_a) == len(low_a) and len(first_b) == len(low_b)
            low_a, high_a, low_b, high_b = low_a[first_a], high_a[first_a], low_b[first_b], high_b[first_b]
        # Intervals meet where one starts within the other. Starts of b within a (their start included),
        # and starts of a strictly within b: every meeting pair is found once.
        self.order_a, self.order_b = np.argsort(low_a, kind='stable'), np.argsort(low_b, kind='stable')
        sorted_a, sorted_b = low_a[self.order_a], low_b[self.order_b]
        self.in_a = (np.searchsorted(sorted_b, low_a, 'left'), np.searchsorted(sorted_b, high_a, 'left'))
        self.in_b = (np.searchsorted(sorted_a, low_b, 'right'), np.searchsorted(sorted_a, high_b, 'left'))
        self.count = int((self.in_a[1] - self.in_a[0]).sum() + np.maximum(self.in_b[1] - self.in_b[0], 0).sum())
        self.cost = self.count if self.all_distinct else self._member_count()

    def pairs(self):
        """Ids of the intervals that meet."""
        i, at = expand_ranges(*self.in_a)
        j2, at2 = expand_ranges(*self.in_b)
        i = np.concatenate([i, self.order_a[at2]])
        j = np.concatenate([self.order_b[at], j2])
        if self.id_a is not None and self.all_distinct:
            # Ids number the intervals in their order; the caller counts boxes in theirs.
            return np.argsort(self.id_a, kind='stable')[i], np.argsort(self.id_b, kind='stable')[j]
        return i, j

    def members(self, a, b, i, j):
        """The boxes of each meeting pair of intervals; the pair's number becomes their group."""
        group_a, position_a = self._expand(self.id_a, i)
        group_b, position_b = self._expand(self.id_b, j)
        return a[position_a], b[position_b], group_a, group_b

    @staticmethod
    def _expand(ids, intervals):
        order = np.argsort(ids, kind='stable')
        ends = np.cumsum(np.bincount(ids))
        starts = np.concatenate([[0], ends[:-1]])
        group, at = expand_ranges(starts[intervals], ends[intervals])
        return group, order[at]

    def _member_count(self):
        """How many boxes ``members`` lists, from prefix sums of the sizes of the intervals."""
        size_a, size_b = np.bincount(self.id_a), np.bincount(self.id_b)
        met_by_a, met_by_b = self.in_a[1] - self.in_a[0], np.maximum(self.in_b[1] - self.in_b[0], 0)
        sums_a = np.concatenate([[0], np.cumsum(size_a[self.order_a])])
        sums_b = np.concatenate([[0], np.cumsum(size_b[self.order_b])])
        through_a = (size_a * met_by_a).sum() + (sums_b[self.in_a[1]] - sums_b[self.in_a[0]]).sum()
        stop = np.maximum(self.in_b[1], self.in_b[0])
        through_b = (size_b * met_by_b).sum() + (sums_a[stop] - sums_a[self.in_b[0]]).sum()
        return int(through_a + through_b)
