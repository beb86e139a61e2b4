# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Joining strided blocks that continue each other, in as many dimensions as they have.

A block pairs two strided views of one shape (a box of a parameter and the addresses that store it, or
the addresses of two shards). Two blocks become one along an axis where *both* views go on: the second
starts exactly ``extent`` steps after the first on either side.
"""

from dataclasses import dataclass, fields, replace

import numpy as np


@dataclass(frozen=True)
class BlockPairs:
    """Blocks with two views each, one row per block.

    Attributes:
        kind: int64[n]; only blocks of one kind are ever joined.
        extent: int64[n, N].
        first, first_strides: int64[n], int64[n, N]: where the first view starts and how it steps, in elements.
        second, second_strides: likewise. The stride on an axis of extent 1 is that at which a longer block would
            go on; a neighbour that is longer there knows better.
        row: int64[n], the number of the original block that the block begins with.
    """
    kind: np.ndarray
    extent: np.ndarray
    first: np.ndarray
    first_strides: np.ndarray
    second: np.ndarray
    second_strides: np.ndarray
    row: np.ndarray

    def take(self, rows):
        return BlockPairs(*(getattr(self, field.name)[rows] for field in fields(self)))


class MergeLimitError(ValueError):
    """Joining would look at more blocks than the caller allows."""

    def __init__(self, checks, limit):
        super().__init__(f'joining blocks takes {checks} comparisons, more than the {limit} allowed')
        self.checks = checks


def merge_blocks(blocks, max_passes=None, max_checks=None):
    """Join blocks until none continues another, innermost axis first.

    Within one kind the first views must not overlap; that is what makes the next block on a line the only
    candidate, so each pass is one sort.

    Args:
        max_passes: stop after so many rounds over all axes, merged or not. Default: until nothing joins.
        max_checks: the largest number of neighbours to compare in all.

    Raises:
        MergeLimitError: more than ``max_checks``.
    """
    passes = checks = 0
    joined = len(blocks.kind) > 1
    while joined and (max_passes is None or passes < max_passes):
        joined = False
        for axis in reversed(range(blocks.extent.shape[1])):
            checks += len(blocks.kind)
            if max_checks is not None and checks > max_checks:
                raise MergeLimitError(checks, max_checks)
            before = len(blocks.kind)
            blocks = _merge_axis(blocks, axis)
            joined |= len(blocks.kind) < before
        passes += 1
    return blocks


def _merge_axis(blocks, axis):
    others = [other for other in range(blocks.extent.shape[1]) if other != axis]
    step = np.maximum(blocks.first_strides[:, axis], 1)
    order = np.lexsort((blocks.first, _line_hash(blocks, others, step)))
    here, there = order[:-1], order[1:]
    size = blocks.extent[:, axis]
    follows = blocks.first[there] == blocks.first[here] + size[here] * blocks.first_strides[here, axis]
    if not follows.any():
        return blocks
    here, there, at = here[follows], there[follows], np.flatnonzero(follows)
    follows = blocks.kind[here] == blocks.kind[there]
    # An axis along which the first view does not step has one index: there a twin is no neighbour.
    follows &= blocks.first_strides[here, axis] > 0
    follows &= blocks.first_strides[here, axis] == blocks.first_strides[there, axis]
    for other in others:
        follows &= blocks.extent[here, other] == blocks.extent[there, other]
        for strides in (blocks.first_strides, blocks.second_strides):
            follows &= (blocks.extent[here, other] == 1) | (strides[here, other] == strides[there, other])
    # The second view goes on at the stride of whichever block has more than one index here.
    ours, theirs = blocks.second_strides[here, axis], blocks.second_strides[there, axis]
    stride = np.where((size[here] == 1) & (size[there] > 1), theirs, ours)
    follows &= (ours == theirs) | ((size[here] > 1) != (size[there] > 1))
    follows &= blocks.second[there] == blocks.second[here] + size[here] * stride
    for outer in range(axis):
        follows &= ~_continues(blocks, here, there, outer)
    at, stride = _without_conflicts(at[follows], stride[follows])
    if not len(at):
        return blocks
    head = np.ones(len(order), bool)
    head[at + 1] = False
    merged = blocks.take(order[head])
    extent, second_strides = merged.extent.copy(), merged.second_strides.copy()
    extent[:, axis] = np.add.reduceat(size[order], np.flatnonzero(head))
    second_strides[(np.cumsum(head) - 1)[at], axis] = stride
    return replace(merged, extent=extent, second_strides=second_strides)


def _continues(blocks, here, there, axis):
    """Whether blocks of one shape could be joined along an axis as well.

    A block that ends a row is followed in address by the next row, which looks like more of the row. Where both
    readings are possible the outer axis is the right one.
    """
    size = blocks.extent[here, axis]
    continues = (blocks.extent[here] == blocks.extent[there]).all(axis=1)
    for start, strides in ((blocks.first, blocks.first_strides), (blocks.second, blocks.second_strides)):
        continues &= start[there] == start[here] + size * strides[here, axis]
    return continues


def _line_hash(blocks, others, step):
    """A number that is equal for all blocks on one line along the axis.

    Blocks of one line are neighbours once sorted by it. Different lines with the same number would only
    hide a join, never make a wrong one: neighbours are compared in full.
    """
    columns = [blocks.kind, blocks.first % step]
    columns += [blocks.extent[:, other] for other in others]
    columns += [np.where(blocks.extent[:, other] > 1, blocks.first_strides[:, other], 0) for other in others]
    mixed = np.zeros(len(blocks.kind), np.uint64)
    for column in columns:
        if column.min() != column.max():
            mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
    return mixed


def _without_conflicts(at, stride):
    """Drop links so that no block is joined to both neighbours at different strides.

    Of a row of links that each contradict the one before, every second one goes, so that the others stand.
    """
    clash = np.zeros(len(at), bool)
    clash[1:] = (at[1:] == at[:-1] + 1) & (stride[1:] != stride[:-1])
    index = np.arange(len(at))
    last_peace = np.maximum.accumulate(np.where(clash, -1, index))
    kept = (index - last_peace) % 2 == 0
    return at[kept], stride[kept]
