# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Proofs about many boxes at once: which boxes tile a region exactly, what a set of boxes leaves free.

**Exact cover.** The indicator function of a box is the N-dimensional prefix sum of its ``2**N`` corners,
taken with sign ``(-1)**(number of upper bounds)``. Prefix sums are invertible, so two collections of
boxes cover every coordinate equally often *if and only if* their signed corners cancel. Sorting the
corners decides that in ``O(n log n)``, however much the boxes overlap, and looks at no coordinate.
"""

import numpy as np

from deepspeed.checkpoint.affine_geometry.columns import KEY_LIMIT, expand_ranges, grouped_keys
from deepspeed.checkpoint.affine_geometry.join import overlapping_pairs


def unbalanced_groups(group, lower, upper, weight):
    """The groups whose weighted boxes do not cancel at every coordinate.

    With weight 1 for the parts and -1 for the whole, a group balances exactly when the parts tile the whole.

    Args:
        group: int64[n], not negative. lower, upper: int64[n, N], no box empty. weight: int64[n].

    Returns:
        int64[k], ascending.

    >>> lower, upper = np.array([[0], [3], [0]]), np.array([[3], [5], [5]])
    >>> unbalanced_groups(np.zeros(3, np.int64), lower, upper, np.array([1, 1, -1])).tolist()
    []
    """
    if not len(group):
        return group
    key, group, weight = _corners(group, lower, upper, weight)
    order = np.argsort(key, kind='stable')
    key = key[order]
    starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    sums = np.add.reduceat(weight[order], starts)
    return np.unique(group[order[starts[sums != 0]]])


def _corners(group, lower, upper, weight):
    """One key per distinct (group, corner); all corners of all boxes, with group and signed weight."""
    key, own = group, group
    for axis in range(lower.shape[1]):
        low, high = lower[:, axis], upper[:, axis]
        bottom, top = int(low.min()), int(high.max())
        if bottom == int(low.max()) and top == int(high.min()):
            continue  # all boxes agree on this axis: it multiplies every indicator function alike
        # Boxes were doubled by the axes before, so their bounds are repeated to match.
        repeats = len(key) // len(low)
        low, high = np.tile(low, repeats), np.tile(high, repeats)
        span = top - bottom + 1
        if (int(key.max()) + 1) * span >= KEY_LIMIT:
            key = np.unique(key, return_inverse=True)[1]
            ranks = np.unique(np.concatenate([low, high]))
            low, high, bottom, span = np.searchsorted(ranks, low), np.searchsorted(ranks, high), 0, len(ranks)
        key = np.concatenate([key * span + (low - bottom), key * span + (high - bottom)])
        own = np.concatenate([own, own])
        weight = np.concatenate([weight, -weight])
    return key, own, weight


def find_overlap(lower, upper, group=None, limit=None):
    """Two boxes of one group that have a coordinate in common, as ``(i, j)`` with ``i < j``, or None.

    Raises:
        PairLimitError: more than ``limit`` pairs meet (every box meets itself).
    """
    i, j = overlapping_pairs(lower, upper, lower, upper, group, group, limit)
    apart = np.flatnonzero(i < j)
    return None if not len(apart) else (int(i[apart[0]]), int(j[apart[0]]))


def uncovered(region_lower, region_upper, group, lower, upper):
    """What boxes leave free of the regions they lie in.

    Args:
        region_lower, region_upper: int64[g, N]; region k belongs to group k; no region empty.
        group: int64[n], in ``range(g)``. lower, upper: int64[n, N], inside their group's region, not empty;
            boxes may overlap.

    Returns:
        ``(group, lower, upper)``: disjoint boxes that hold exactly what no given box holds.

    >>> group, low, high = uncovered(np.array([[0]]), np.array([[9]]), np.array([0]), np.array([[2]]), np.array([[5]]))
    >>> low.tolist(), high.tolist()
    ([[0], [5]], [[2], [9]])
    """
    owner = np.arange(len(region_lower))
    free = []
    axes = list(range(region_lower.shape[1]))
    while len(axes) > 1:
        # Where the boxes split an axis least, slabs are few and the boxes lie in few of them.
        slabs = [_Slabs(axis, region_lower, region_upper, group, lower, upper) for axis in axes]
        slab = min(slabs, key=lambda candidate: candidate.cost)
        axes.remove(slab.axis)
        region, region_lower, region_upper, part, group = slab.cut(region_lower, region_upper)
        owner, lower, upper = owner[region], lower[part], upper[part]
        untouched = np.bincount(group, minlength=len(owner)) == 0
        free.append((owner[untouched], region_lower[untouched], region_upper[untouched]))
        kept = np.cumsum(~untouched) - 1
        owner, region_lower, region_upper = owner[~untouched], region_lower[~untouched], region_upper[~untouched]
        group = kept[group]
    free.append(_gaps(axes[0], owner, region_lower, region_upper, group, lower, upper))
    return tuple(np.concatenate(parts) for parts in zip(*free))


class _Slabs:
    """One axis of every region, cut at the edges of the boxes in it."""

    def __init__(self, axis, region_lower, region_upper, group, lower, upper):
        self.axis = axis
        regions = np.arange(len(region_lower))
        edges = [(regions, region_lower[:, axis]), (regions, region_upper[:, axis]), (group, lower[:, axis]),
                 (group, upper[:, axis])]
        keys = grouped_keys(*edges)
        self.edge, where = np.unique(np.concatenate(keys), return_index=True)
        self.edge_region = np.concatenate([own for own, _ in edges])[where]
        self.edge_at = np.concatenate([at for _, at in edges])[where]
        self.first, self.last = np.searchsorted(self.edge, keys[2]), np.searchsorted(self.edge, keys[3])
        self.cost = int((self.last - self.first).sum()) + len(self.edge)

    def cut(self, region_lower, region_upper):
        """Slabs as regions of their own, and the boxes cut by them: region of each slab, its bounds, box, its slab."""
        inner = np.flatnonzero(self.edge_region[1:] == self.edge_region[:-1])
        region = self.edge_region[inner]
        low, high = region_lower[region].copy(), region_upper[region].copy()
        low[:, self.axis], high[:, self.axis] = self.edge_at[inner], self.edge_at[inner + 1]
        number = np.full(len(self.edge), -1)
        number[inner] = np.arange(len(inner))
        part, edge = expand_ranges(self.first, self.last)
        return region, low, high, part, number[edge]


def _gaps(axis, owner, region_lower, region_upper, group, lower, upper):
    """What intervals on the last axis leave free of each region."""
    regions = np.arange(len(owner))
    # The ends of every region, as intervals of no length, bound the gaps before the first and after the last.
    own = np.concatenate([regions, group, regions])
    low = np.concatenate([region_lower[:, axis], lower[:, axis], region_upper[:, axis]])
    high = np.concatenate([region_lower[:, axis], upper[:, axis], region_upper[:, axis]])
    low_key, high_key = grouped_keys((own, low), (own, high))
    order = np.lexsort((high_key, low_key))
    own, low, high, low_key = own[order], low[order], high[order], low_key[order]
    reach_key = np.maximum.accumulate(high_key[order])
    gap = np.flatnonzero((low_key[1:] > reach_key[:-1]) & (own[1:] == own[:-1]))
    # The interval that reaches furthest is the last one at which the running maximum grew.
    grew = np.concatenate([[True], reach_key[1:] > reach_key[:-1]]) if len(own) else np.zeros(0, bool)
    furthest = np.maximum.accumulate(np.where(grew, np.arange(len(own)), 0))
    free_lower, free_upper = region_lower[own[gap]].copy(), region_upper[own[gap]].copy()
    free_lower[:, axis], free_upper[:, axis] = high[furthest[gap]], low[gap + 1]
    return owner[own[gap]], free_lower, free_upper
