# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Strided blocks of shard addresses, seen as boxes.

A block ``(offset, extent, strides)`` of a flat shard is a set of addresses. Blocks whose hulls (from
first to last address) do not meet cannot collide, so a shard falls apart into *spans* of blocks with
touching hulls. Within a span the strides of all blocks must form a divisibility chain
``1 | s1 | s2 | ...``. An address, counted from the start of its span, is then a mixed-radix number with
one digit per stride, and a block is a box of digits (or a few, where it carries from one digit into the
next). Everything that is known about boxes then holds for addresses.
"""

from dataclasses import dataclass

import numpy as np

from deepspeed.checkpoint.affine_geometry.columns import KEY_LIMIT, expand_ranges, grouped_keys, row_ids
from deepspeed.checkpoint.affine_geometry.cover import find_overlap, unbalanced_groups

# A block of few axes that carries becomes a handful of boxes; only a hostile one of many axes becomes more.
_BOXES_PER_BLOCK = 256


class AddressLayoutError(ValueError):
    """Blocks whose addresses cannot be seen as boxes; ``block`` is the number of one of them."""

    def __init__(self, block, reason):
        super().__init__(reason)
        self.block = block


class AddressCollisionError(ValueError):
    """Addresses that are used twice; ``blocks`` are the numbers of two blocks (perhaps the same) that do."""

    def __init__(self, blocks):
        super().__init__(f'blocks {blocks[0]} and {blocks[1]} use the same addresses')
        self.blocks = blocks


@dataclass(frozen=True)
class AddressBoxes:
    """Blocks as boxes of digits, one row per box.

    Attributes:
        block: int64[n], the block a box is a part of; more than one box where the block carries.
        span: int64[n], the span it lies in; boxes of different spans never meet.
        lower, upper: int64[n, D], digits, the outermost first.
        strides: int64[spans, D], elements per digit. start: int64[spans], the address that all-zero digits mean.
    """
    block: np.ndarray
    span: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    strides: np.ndarray
    start: np.ndarray


def address_boxes(shard, offset, extent, strides):
    """See blocks of shard addresses as boxes of digits.

    Args:
        shard: int64[n], whose addresses they are.
        offset: int64[n], elements. extent, strides: int64[n, N]; extents positive, strides not negative; strides
            where the extent is 1 do not matter.

    Raises:
        AddressCollisionError: a block that uses an address twice.
        AddressLayoutError: strides that form no divisibility chain within a span.
    """
    still = ((extent > 1) & (strides == 0)).any(axis=1)
    if still.any():
        raise AddressCollisionError((int(np.argmax(still)), ) * 2)
    strides = np.where(extent > 1, strides, 0)
    last = offset + ((extent - 1) * strides).sum(axis=1)
    span, start = _spans(shard, offset, last)
    chain = _chains(span, len(start), extent, strides)
    return _digits(span, start, chain, offset, extent, strides)


def join_dense_axes(extent, strides):
    """The same blocks with fewer axes: those that continue each other, in whatever order they stand, are one.

    A dense block becomes one run of stride 1 whatever its shape, so it fits any chain.
    """
    extent, strides = extent.copy(), np.where(extent > 1, strides, 0)
    order = np.argsort(-strides, axis=1, kind='stable')
    extent, strides = np.take_along_axis(extent, order, 1), np.take_along_axis(strides, order, 1)
    for axis in range(extent.shape[1] - 1, 0, -1):
        inner = extent[:, axis] * strides[:, axis]
        joins = (extent[:, axis] > 1) & (extent[:, axis - 1] > 1) & (strides[:, axis - 1] == inner)
        extent[joins, axis - 1] *= extent[joins, axis]
        strides[joins, axis - 1] = strides[joins, axis]
        extent[joins, axis], strides[joins, axis] = 1, 0
    # Joined axes sit where the wider one sat: an axis of extent 1 may follow, which is why zeros are skipped below.
    used = (extent > 1).any(axis=0)
    if not used.any():
        used[:1] = True
    return extent[:, used], strides[:, used]


def split_dense_axes(offset, extent, strides, limit):
    """Cut blocks until none has an axis that continues another, so that their strides are those that joining leaves.

    Returns:
        ``(block, offset, extent)``: int64[m], int64[m], int64[m, N]; part k belongs to block ``block[k]`` and steps
        with its strides.

    Raises:
        AddressLayoutError: more than ``limit`` parts.
    """
    inner = np.where(extent > 1, extent * strides, 0)
    continues = (extent > 1) & (strides[:, :, None] == inner[:, None, :]).any(axis=2)
    turns = np.where(continues, extent, 1)
    # Counted as floats, which cannot wrap.
    if turns.astype(np.float64).prod(axis=1).sum() > limit:
        raise AddressLayoutError(int(turns.astype(np.float64).prod(axis=1).argmax()),
                                 f'its addresses are boxes only in more than {limit} parts')
    counts = turns.prod(axis=1)
    block, index = expand_ranges(np.zeros_like(counts), counts)
    part_offset = offset[block].copy()
    for axis in range(extent.shape[1] - 1, -1, -1):
        index, step = np.divmod(index, turns[block, axis])
        part_offset += step * strides[block, axis]
    return block, part_offset, np.where(continues, 1, extent)[block]


def _spans(shard, first, last):
    """Number the groups of blocks whose hulls touch, and give each group's first address."""
    order = np.lexsort((first, shard))
    shard, first, last = shard[order], first[order], last[order]
    shards, _ = row_ids(shard)
    first_key, last_key = grouped_keys((shards, first), (shards, last))
    reach = np.maximum.accumulate(last_key)
    opens = np.ones(len(order), bool)
    opens[1:] = first_key[1:] > reach[:-1]
    span = np.empty(len(order), np.int64)
    span[order] = np.cumsum(opens) - 1
    return span, first[opens]


def _chains(span, spans, extent, strides):
    """The strides that occur in each span: int64[spans, D], widest first, the last one 1, unused ones 0."""
    block, axis = np.nonzero(extent > 1)
    stride, owner = strides[block, axis], span[block]
    # Every chain ends at stride 1, so that blocks which start between wider strides have a digit to say so.
    owner = np.concatenate([owner, np.arange(spans)])
    stride = np.concatenate([stride, np.ones(spans, np.int64)])
    block = np.concatenate([block, np.full(spans, -1)])
    _, first = row_ids(owner, stride)
    owner, stride, block = owner[first], stride[first], block[first]
    follows = owner[1:] == owner[:-1]
    broken = follows & (stride[1:] % np.maximum(stride[:-1], 1) != 0)
    if broken.any():
        bad = int(np.argmax(broken))
        raise AddressLayoutError(
            max(int(block[bad + 1]), 0),
            f'strides {stride[bad]} and {stride[bad + 1]} interleave in one shard and neither divides the other')
    position = np.arange(len(owner)) - np.searchsorted(owner, owner, 'left')
    chain = np.zeros((spans, int(position.max()) + 1 if len(position) else 1), np.int64)
    chain[owner, position] = stride
    return chain[:, ::-1]


def _digits(span, start, chain, offset, extent, strides):
    """Blocks as boxes of digits along the chain of their span, with carries cut."""
    depth = chain.shape[1]
    own = chain[span]
    lower, size = np.zeros((len(span), depth), np.int64), np.ones((len(span), depth), np.int64)
    rest = offset - start[span]
    for digit in range(depth):
        stride = np.maximum(own[:, digit], 1)
        lower[:, digit] = np.where(own[:, digit] > 0, rest // stride, 0)
        rest = rest - lower[:, digit] * stride
        for axis in range(extent.shape[1]):
            here = (extent[:, axis] > 1) & (strides[:, axis] == own[:, digit])
            doubled = here & (size[:, digit] > 1)
            if doubled.any():
                bad = int(np.argmax(doubled))
                raise AddressCollisionError((bad, bad))
            size[here, digit] = extent[here, axis]
    block = np.arange(len(span))
    for digit in range(depth - 1, 0, -1):
        block, own, lower, size = _carry(digit, block, own, lower, size)
        if len(block) > _BOXES_PER_BLOCK * len(span):
            worst = int(np.bincount(block).argmax())
            raise AddressLayoutError(worst, 'its addresses carry over so many strides that they are no few boxes')
    return AddressBoxes(block, span[block], lower, lower + size, chain, start)


def _carry(digit, block, own, lower, size):
    """Cut the boxes that run over the end of a digit, so that the rest is counted by the digit before it.

    A run of ``size`` steps from ``lower`` becomes at most three boxes: up to the end of the digit, whole
    turns of it, and what is left.
    """
    wide, narrow = own[:, digit - 1], own[:, digit]
    radix = np.where((wide > 0) & (narrow > 0), wide // np.maximum(narrow, 1), KEY_LIMIT)
    turns, at = np.divmod(lower[:, digit], radix)
    lower = lower.copy()
    lower[:, digit], lower[:, digit - 1] = at, lower[:, digit - 1] + turns
    over = at + size[:, digit] > radix
    if not over.any():
        return block, own, lower, size
    collides = over & (size[:, digit - 1] > 1) & (size[:, digit] > radix)
    if collides.any():
        bad = int(block[np.argmax(collides)])
        raise AddressCollisionError((bad, bad))
    kept = ~over
    parts = [(block[kept], own[kept], lower[kept], size[kept])]
    lower, size, radix = lower[over], size[over], radix[over]
    head = radix - lower[:, digit]
    whole, tail = np.divmod(size[:, digit] - head, radix)
    turned = np.where(whole > 0, radix, 0)
    # Boxes that are more than one step wide on the digit before hold no whole turn, so repeats never multiply.
    for carried, begin, length, repeats in ((0, lower[:, digit], head, 1), (1, 0, turned, whole), (1 + whole, 0, tail,
                                                                                                   1)):
        part_lower, part_size = lower.copy(), size.copy()
        part_lower[:, digit], part_size[:, digit] = begin, length
        part_lower[:, digit - 1] += carried
        part_size[:, digit - 1] *= repeats
        full = length > 0
        parts.append((block[over][full], own[over][full], part_lower[full], part_size[full]))
    return tuple(np.concatenate(columns) for columns in zip(*parts))


def check_addresses_apart(shard, offset, extent, strides, limit=None):
    """Raise unless no address of a shard is used by two blocks, or twice by one.

    Args: as for ``address_boxes``; ``limit`` bounds the comparisons that a tangled layout needs.

    Raises:
        AddressCollisionError, AddressLayoutError, PairLimitError.
    """
    if not len(shard):
        return
    extent, strides = join_dense_axes(extent, strides)
    boxes = address_boxes(shard, offset, extent, strides)
    shared = np.bincount(boxes.block, minlength=len(shard))
    crowded = np.bincount(boxes.span[np.unique(boxes.block, return_index=True)[1]], minlength=len(boxes.start)) > 1
    rows = np.flatnonzero(crowded[boxes.span] | (shared[boxes.block] > 1))
    if not len(rows) or _fills_its_hull(boxes, rows, offset, extent, strides):
        return
    found = find_overlap(boxes.lower[rows], boxes.upper[rows], boxes.span[rows], limit)
    if found is not None:
        raise AddressCollisionError(tuple(int(boxes.block[rows[k]]) for k in found))


def _fills_its_hull(boxes, rows, offset, extent, strides):
    """Whether the boxes of every span tile it from its first address to its last: proof that none meet."""
    span = boxes.span[rows]
    last = (offset + ((extent - 1) * strides).sum(axis=1))[boxes.block[rows]]
    spans, where = np.unique(span, return_inverse=True)
    stop = np.zeros(len(spans), np.int64)
    np.maximum.at(stop, where, last + 1)
    hull = stop - boxes.start[spans]
    volume = np.zeros(len(spans), np.int64)
    np.add.at(volume, where, (boxes.upper[rows] - boxes.lower[rows]).prod(axis=1))
    if (volume != hull).any():
        return False
    whole = _digits(spans, boxes.start, boxes.strides, boxes.start[spans], hull[:, None],
                    np.ones((len(spans), 1), np.int64))
    group = np.concatenate([span, whole.span])
    lower = np.concatenate([boxes.lower[rows], whole.lower])
    upper = np.concatenate([boxes.upper[rows], whole.upper])
    weight = np.concatenate([np.ones(len(rows), np.int64), np.full(len(whole.span), -1)])
    return not len(unbalanced_groups(group, lower, upper, weight))
