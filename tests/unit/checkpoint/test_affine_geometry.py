# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Boxes, runs, joins and covers, each compared with what walking every coordinate says."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from affine_oracle import addresses, count, element_grid
from deepspeed.checkpoint.affine_geometry.addresses import (AddressCollisionError, AddressLayoutError, address_boxes,
                                                            check_addresses_apart)
from deepspeed.checkpoint.affine_geometry.box import LogicalBox, subtract
from deepspeed.checkpoint.affine_geometry.columns import expand_ranges, grouped_keys, row_ids
from deepspeed.checkpoint.affine_geometry.cover import find_overlap, unbalanced_groups, uncovered
from deepspeed.checkpoint.affine_geometry.join import PairLimitError, overlapping_pairs
from deepspeed.checkpoint.affine_geometry.merge import BlockPairs, MergeLimitError, merge_blocks
from deepspeed.checkpoint.affine_geometry.runs import lower_run, lower_runs
from deepspeed.checkpoint.affine_geometry.strides import (offset_to_coordinate, offsets_to_coordinates, product,
                                                          row_major_strides)


def coordinates(lower, upper):
    """Every coordinate of a box, as a set of tuples."""
    return set(itertools.product(*[range(int(low), int(high)) for low, high in zip(lower, upper)]))


def box_coordinates(box):
    return coordinates(box.origin, box.upper())


@st.composite
def boxes(draw, axes, smallest=0, span=6):
    """Bounds of one box."""
    lower, upper = [], []
    for _ in range(axes):
        low = draw(st.integers(-2, span - smallest))
        lower.append(low)
        upper.append(draw(st.integers(low + smallest, span)))
    return tuple(lower), tuple(upper)


@st.composite
def box_columns(draw, axes, most=8, smallest=1):
    """Bounds of many boxes: int64[n, N] twice."""
    bounds = draw(st.lists(boxes(axes, smallest), max_size=most))
    shape = (len(bounds), axes)
    return (np.array([low for low, _ in bounds],
                     np.int64).reshape(shape), np.array([high for _, high in bounds], np.int64).reshape(shape))


def logical_box(bounds):
    lower, upper = bounds
    return LogicalBox(lower, tuple(high - low for low, high in zip(lower, upper)))


# --------------------------------------------------------------------------------------------- boxes


def test_box_by_hand():
    box = LogicalBox((1, 2), (3, 4))
    assert box.upper() == (4, 6)
    assert box.volume == 12
    assert not box.is_empty
    assert LogicalBox((1, 2), (3, 0)).is_empty
    assert box.intersection(LogicalBox((3, 0), (9, 3))) == LogicalBox((3, 2), (1, 1))
    assert box.intersection(LogicalBox((4, 2), (1, 1))).is_empty
    assert box.contains(LogicalBox((1, 2), (3, 4)))
    assert box.contains(LogicalBox((2, 3), (1, 1)))
    assert not box.contains(LogicalBox((0, 2), (1, 1)))
    assert not box.contains(LogicalBox((1, 2), (3, 5)))


def test_box_of_no_axes_is_one_point():
    point = LogicalBox((), ())
    assert point.volume == 1
    assert not point.is_empty
    assert point.intersection(point) == point
    assert subtract(point, point) == []


def test_box_wants_one_extent_per_axis():
    with pytest.raises(ValueError, match='one extent per axis'):
        LogicalBox((0, 0), (1, ))


def test_volume_does_not_wrap():
    assert LogicalBox((0, 0), (2**40, 2**40)).volume == 2**80
    assert product((2**40, 2**40)) == 2**80


@given(st.integers(0, 4).flatmap(lambda axes: st.tuples(boxes(axes), boxes(axes))))
def test_intersection_and_contains(pair):
    one, other = map(logical_box, pair)
    shared = box_coordinates(one) & box_coordinates(other)
    assert box_coordinates(one.intersection(other)) == shared
    assert one.intersection(other).volume == len(shared)
    if not other.is_empty:
        assert one.contains(other) == (shared == box_coordinates(other))


@given(st.integers(0, 4).flatmap(lambda axes: st.tuples(boxes(axes), boxes(axes))))
def test_subtract_leaves_exactly_the_rest(pair):
    region, cut = map(logical_box, pair)
    rest = subtract(region, cut)
    assert len(rest) <= max(1, 2 * len(region.origin))
    assert not any(part.is_empty for part in rest)
    found = [coordinate for part in rest for coordinate in box_coordinates(part)]
    assert len(found) == len(set(found))
    assert set(found) == box_coordinates(region) - box_coordinates(cut)


# ------------------------------------------------------------------------------ strides and offsets


@pytest.mark.parametrize('shape, strides', [((), ()), ((5, ), (1, )), ((3, 4), (4, 1)), ((2, 3, 4), (12, 4, 1)),
                                            ((2, 1, 4), (4, 4, 1)), ((2**20, 2**21), (2**21, 1))])
def test_row_major_strides_by_hand(shape, strides):
    assert row_major_strides(shape) == strides


@given(st.lists(st.integers(0, 4), max_size=4))
def test_strides_and_coordinates_agree_with_numpy(shape):
    numel = count(shape)
    assert product(shape) == numel
    if numel:
        assert np.array_equal(addresses(shape, 0, row_major_strides(shape)), np.arange(numel))
    expected = [tuple(map(int, np.unravel_index(offset, shape))) if shape else () for offset in range(numel)]
    assert [offset_to_coordinate(offset, shape) for offset in range(numel)] == expected
    found = offsets_to_coordinates(np.arange(numel), shape)
    assert found.shape == (numel, len(shape))
    assert [tuple(row) for row in found.tolist()] == expected


@pytest.mark.parametrize('offset, shape', [(-1, (3, )), (3, (3, )), (6, (2, 3)), (1, ()), (0, (0, )), (0, (3, 0))])
def test_offset_outside_has_no_coordinate(offset, shape):
    assert offset_to_coordinate(offset, shape) is None


# ---------------------------------------------------------------------------------------------- runs


def fewest_boxes(shape, start, stop):
    """The least number of boxes that a flat run splits into, by trying every way to cut it."""
    grid = element_grid(shape)
    fewest = {start: 0}
    for end in range(start + 1, stop + 1):
        options = [
            fewest[begin] + 1 for begin in range(start, end) if _is_box(grid, np.arange(begin, end, dtype=np.int64))
        ]
        fewest[end] = min(options)
    return fewest[stop]


def _is_box(grid, elements):
    where = np.argwhere((grid >= elements[0]) & (grid <= elements[-1]))
    if grid.ndim == 0:
        return True
    return int(np.prod(where.max(axis=0) - where.min(axis=0) + 1)) == len(elements)


@st.composite
def runs(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, count(shape))] * 2)))
    return shape, start, stop


@pytest.mark.parametrize('shape, run, expected',
                         [
                             ((3, 4), (2, 11), [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]),
                             ((3, 4), (0, 12), [((0, 0), (3, 4))]),
                             ((3, 4), (4, 12), [((1, 0), (2, 4))]),
                             ((3, 4), (5, 7), [((1, 1), (1, 2))]),
                             ((3, 4), (3, 5), [((0, 3), (1, 1)), ((1, 0), (1, 1))]),
                             ((7, ), (2, 5), [((2, ), (3, ))]),
                             ((), (0, 1), [((), ())]),
                             ((), (0, 0), []),
                             ((3, 0), (0, 0), []),
                             ((3, 4), (6, 6), []),
                             ((2, 3, 4), (1, 23), [((0, 0, 1), (1, 1, 3)), ((0, 1, 0), (1, 2, 4)),
                                                   ((1, 0, 0), (1, 2, 4)), ((1, 2, 0), (1, 1, 3))]),
                             ((3, 3, 4), (1, 35), [((0, 0, 1), (1, 1, 3)), ((0, 1, 0), (1, 2, 4)),
                                                   ((1, 0, 0), (1, 3, 4)), ((2, 0, 0), (1, 2, 4)),
                                                   ((2, 2, 0), (1, 1, 3))]),
                         ])
def test_lower_run_by_hand(shape, run, expected):
    assert lower_run(shape, *run) == [LogicalBox(*box) for box in expected]


@settings(max_examples=300)
@given(runs())
def test_lowered_run_is_the_run_in_order_and_in_few_boxes(case):
    shape, start, stop = case
    lowered = lower_run(shape, start, stop)
    grid = element_grid(shape)
    parts = [
        grid[tuple(slice(low, high) for low, high in zip(box.origin, box.upper()))].reshape(-1) for box in lowered
    ]
    assert np.concatenate([np.zeros(0, np.int64), *parts]).tolist() == list(range(start, stop))
    assert len(lowered) <= max(1, 2 * len(shape) - 1)
    assert len(lowered) == fewest_boxes(shape, start, stop)


@given(st.lists(st.integers(0, 5), max_size=4), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=6))
def test_many_runs_are_lowered_like_each_alone(shape, fractions):
    numel = count(shape)
    bounds = [sorted((int(a * numel), int(b * numel))) for a, b in fractions]
    run, lower, extent = lower_runs(shape, [low for low, _ in bounds], [high for _, high in bounds])
    found = [(int(index), LogicalBox(tuple(low), tuple(size)))
             for index, low, size in zip(run, lower.tolist(), extent.tolist())]
    alone = [(index, box) for index, bound in enumerate(bounds) for box in lower_run(shape, *bound)]
    assert found == alone


@pytest.mark.parametrize('run', [(-1, 2), (3, 2), (0, 13)])
def test_run_outside_the_tensor_is_refused(run):
    with pytest.raises(ValueError, match='no run of the 12 elements'):
        lower_run((3, 4), *run)


def test_runs_of_a_huge_tensor():
    shape = (2**20, 2**20)
    lowered = lower_run(shape, 2**39 + 5, 2**40 - 7)
    assert lowered == [
        LogicalBox((2**19, 5), (1, 2**20 - 5)),
        LogicalBox((2**19 + 1, 0), (2**19 - 2, 2**20)),
        LogicalBox((2**20 - 1, 0), (1, 2**20 - 7))
    ]


# ------------------------------------------------------------------------------------------- columns


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), max_size=8))
def test_expand_ranges(ranges):
    starts, stops = (np.array([pair[side] for pair in ranges], np.int64) for side in (0, 1))
    owner, value = expand_ranges(starts, stops)
    expected = [(index, number) for index, (start, stop) in enumerate(ranges) for number in range(start, stop)]
    assert list(zip(owner.tolist(), value.tolist())) == expected


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.integers(0, 1)), max_size=12))
def test_row_ids_number_distinct_rows_in_order(rows):
    table = np.array(rows, np.int64).reshape(len(rows), 3)
    ids, first = row_ids(table[:, 0], table[:, 1:])
    distinct = sorted(set(rows))
    assert ids.tolist() == [distinct.index(row) for row in rows]
    assert [rows[index] for index in first.tolist()] == distinct


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-9, 9)), min_size=1, max_size=8),
       st.sampled_from([0, 2**60, 2**61 - 20]))
def test_grouped_keys_order_like_pairs(pairs, distance):
    """Coordinates so far apart that a product would wrap are ordered as well as near ones."""
    pairs = [(group, value + distance * (value % 2)) for group, value in pairs]
    group, value = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    keys, again = grouped_keys((group, value), (group, value))
    assert keys.tolist() == again.tolist()
    for one, other in itertools.product(range(len(pairs)), repeat=2):
        assert (keys[one] < keys[other]) == (pairs[one] < pairs[other])


# --------------------------------------------------------------------------------------------- joins


@st.composite
def two_box_lists(draw):
    axes = draw(st.integers(0, 4))
    a, b = draw(box_columns(axes)), draw(box_columns(axes))
    groups = [
        np.array(draw(st.lists(st.integers(0, 2), min_size=len(one[0]), max_size=len(one[0]))), np.int64)
        for one in (a, b)
    ]
    return a, b, groups


def meeting(a, b, groups):
    return sorted((i, j) for i in range(len(a[0])) for j in range(len(b[0]))
                  if groups[0][i] == groups[1][j] and coordinates(a[0][i], a[1][i]) & coordinates(b[0][j], b[1][j]))


@settings(max_examples=300)
@given(two_box_lists())
def test_overlapping_pairs_are_those_that_meet(case):
    a, b, groups = case
    i, j = overlapping_pairs(*a, *b, *groups)
    expected = meeting(a, b, groups)
    assert sorted(zip(i.tolist(), j.tolist())) == expected
    if expected:
        with pytest.raises(PairLimitError) as caught:
            overlapping_pairs(*a, *b, *groups, limit=len(expected) - 1)
        assert caught.value.limit == len(expected) - 1
    kept, _ = overlapping_pairs(*a, *b, *groups, limit=len(expected))
    assert len(kept) == len(expected)


@given(two_box_lists())
def test_overlapping_pairs_without_groups(case):
    a, b, _ = case
    i, j = overlapping_pairs(*a, *b)
    together = [np.zeros(len(one[0]), np.int64) for one in (a, b)]
    assert sorted(zip(i.tolist(), j.tolist())) == meeting(a, b, together)


def test_join_of_a_grid_with_itself_is_not_quadratic():
    """200,000 disjoint boxes: pairwise this would be 4e10 comparisons."""
    lower = np.stack(np.meshgrid(np.arange(1000), np.arange(200), indexing='ij'), axis=-1).reshape(-1, 2)
    i, j = overlapping_pairs(lower, lower + 1, lower, lower + 1)
    assert np.array_equal(np.sort(i), np.arange(len(lower)))
    assert np.array_equal(i, j)


# -------------------------------------------------------------------------------------------- covers


@st.composite
def tilings(draw):
    """A region and boxes that tile it, made by cutting it again and again."""
    axes = draw(st.integers(0, 4))
    lower, upper = draw(boxes(axes, smallest=1, span=4))
    parts = [(lower, upper)]
    for _ in range(draw(st.integers(0, 5)) if axes else 0):
        low, high = parts.pop(draw(st.integers(0, len(parts) - 1)))
        axis = draw(st.integers(0, axes - 1))
        at = draw(st.integers(low[axis], high[axis]))
        halves = [(low, (*high[:axis], at, *high[axis + 1:])), ((*low[:axis], at, *low[axis + 1:]), high)]
        parts += [half for half in halves if coordinates(*half)]
    return (lower, upper), parts


def _columns(bounds, axes):
    return tuple(np.array([bound[side] for bound in bounds], np.int64).reshape(len(bounds), axes) for side in (0, 1))


def _balance(region, parts):
    axes = len(region[0])
    lower, upper = _columns([*parts, region], axes)
    weight = np.array([1] * len(parts) + [-1], np.int64)
    return unbalanced_groups(np.zeros(len(weight), np.int64), lower, upper, weight).tolist()


@given(tilings())
def test_a_tiling_covers_exactly(case):
    assert _balance(*case) == []


@settings(max_examples=200)
@given(tilings(), st.data())
def test_a_changed_tiling_does_not_cover_exactly(case, data):
    region, parts = case
    victim = data.draw(st.integers(0, len(parts) - 1))
    change = data.draw(st.sampled_from(['lost', 'twice', 'moved']))
    if change == 'lost':
        del parts[victim]
    elif change == 'twice':
        parts.append(parts[victim])
    elif len(region[0]):
        low, high = parts[victim]
        axis = data.draw(st.integers(0, len(low) - 1))
        parts[victim] = tuple((*bound[:axis], bound[axis] + 1, *bound[axis + 1:]) for bound in (low, high))
    else:
        parts.append(parts[victim])
    assert _balance(region, parts) == [0]


@settings(max_examples=200)
@given(
    st.integers(0, 3).flatmap(
        lambda axes: st.lists(st.tuples(st.integers(0, 2), st.integers(-2, 2), boxes(axes, smallest=1, span=3)),
                              max_size=6).map(lambda found: (axes, found))))
def test_unbalanced_groups_against_counting(case):
    axes, found = case
    lower, upper = _columns([bounds for _, _, bounds in found], axes)
    group, weight = (np.array([entry[side] for entry in found], np.int64) for side in (0, 1))
    sums = {}
    for own, factor, bounds in found:
        for coordinate in coordinates(*bounds):
            sums[own, coordinate] = sums.get((own, coordinate), 0) + factor
    expected = sorted({own for (own, _), total in sums.items() if total != 0})
    assert unbalanced_groups(group, lower, upper, weight).tolist() == expected


def test_cover_of_a_huge_region_looks_at_no_coordinate():
    size = 2**31
    parts = [((0, 0), (size, 7)), ((0, 7), (5, size)), ((5, 7), (size, size))]
    region = ((0, 0), (size, size))
    assert _balance(region, parts) == []
    assert _balance(region, parts[:2]) == [0]
    assert _balance(region, [*parts[:2], ((5, 7), (size, size - 1))]) == [0]


@given(st.integers(0, 4).flatmap(lambda axes: box_columns(axes, most=6)), st.data())
def test_find_overlap(columns, data):
    lower, upper = columns
    group = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(lower), max_size=len(lower))), np.int64)
    pair = find_overlap(lower, upper, group)
    expected = [(i, j) for i, j in meeting(columns, columns, (group, group)) if i < j]
    assert (pair in expected) if expected else (pair is None)


@st.composite
def regions_with_boxes(draw):
    """Some regions, and boxes that lie in them and may overlap."""
    axes = draw(st.integers(1, 4))
    regions = [draw(boxes(axes, smallest=1, span=3)) for _ in range(draw(st.integers(1, 3)))]
    inside = []
    for _ in range(draw(st.integers(0, 6))):
        group = draw(st.integers(0, len(regions) - 1))
        bounds = []
        for low, high in zip(*regions[group]):
            start = draw(st.integers(low, high - 1))
            bounds.append((start, draw(st.integers(start + 1, high))))
        inside.append((group, (tuple(low for low, _ in bounds), tuple(high for _, high in bounds))))
    return axes, regions, inside


@settings(max_examples=300)
@given(regions_with_boxes())
def test_uncovered_is_exactly_the_rest(case):
    axes, regions, inside = case
    group = np.array([own for own, _ in inside], np.int64)
    free_group, free_lower, free_upper = uncovered(*_columns(regions, axes), group,
                                                   *_columns([bounds for _, bounds in inside], axes))
    found = [(int(own), coordinate) for own, low, high in zip(free_group, free_lower, free_upper)
             for coordinate in coordinates(low, high)]
    assert len(found) == len(set(found))
    expected = {(own, coordinate) for own, bounds in enumerate(regions) for coordinate in coordinates(*bounds)}
    expected -= {(own, coordinate) for own, bounds in inside for coordinate in coordinates(*bounds)}
    assert set(found) == expected


# ----------------------------------------------------------------------------------------- addresses


@st.composite
def address_blocks(draw, strides, smallest=1):
    """Strided blocks in one or two shards: columns, and each block's addresses as ``(shard, address)`` lists."""
    axes = draw(st.integers(0, 3))
    rows = draw(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), *[st.tuples(st.integers(1, 4), strides)] * axes),
                 max_size=5))
    shard, offset = (np.array([row[side] for row in rows], np.int64) for side in (0, 1))
    extent, stride = (np.array([[pair[side] for pair in row[2:]] for row in rows], np.int64).reshape(len(rows), axes)
                      for side in (0, 1))
    used = [[(int(shard[k]), address) for address in addresses(extent[k], offset[k], stride[k]).tolist()]
            for k in range(len(rows))]
    return (shard, offset, extent, stride), used


def _two_that_collide(used):
    """All pairs of blocks with an address in common; a block that uses one twice is a pair with itself."""
    alone = {(k, k) for k, own in enumerate(used) if len(set(own)) < len(own)}
    return alone | {(i, j) for i, j in itertools.combinations(range(len(used)), 2) if set(used[i]) & set(used[j])}


@settings(max_examples=400)
@given(
    st.sampled_from([(1, 2, 4, 12), (1, 3, 6),
                     (1, 5, 10)]).flatmap(lambda chain: address_blocks(st.sampled_from(chain))))
def test_addresses_of_a_divisibility_chain_are_decided(case):
    columns, used = case
    colliding = _two_that_collide(used)
    if not colliding:
        assert check_addresses_apart(*columns) is None
        return
    with pytest.raises(AddressCollisionError) as caught:
        check_addresses_apart(*columns)
    assert tuple(sorted(caught.value.blocks)) in colliding


@settings(max_examples=400)
@given(address_blocks(st.integers(0, 9)))
def test_addresses_of_any_strides_are_decided_or_refused(case):
    columns, used = case
    colliding = _two_that_collide(used)
    try:
        check_addresses_apart(*columns)
    except AddressCollisionError as error:
        assert tuple(sorted(error.blocks)) in colliding
    except AddressLayoutError as error:
        assert 0 <= error.block < len(used)
    else:
        assert not colliding


@settings(max_examples=300)
@given(st.sampled_from([(1, 2, 4, 12), (1, 3, 6)]).flatmap(lambda chain: address_blocks(st.sampled_from(chain))))
def test_address_boxes_hold_the_addresses_of_their_blocks(case):
    columns, used = case
    if any(i == j for i, j in _two_that_collide(used)) or not used:
        return
    found = address_boxes(*columns)
    held = [[] for _ in used]
    for k, span in enumerate(found.span.tolist()):
        extent = found.upper[k] - found.lower[k]
        first = found.start[span] + (found.lower[k] * found.strides[span]).sum()
        held[found.block[k]] += addresses(extent, first, found.strides[span]).tolist()
    assert [sorted(own) for own in held] == [sorted(address for _, address in own) for own in used]
    spans = [set() for _ in found.start]
    for k, span in enumerate(found.span.tolist()):
        spans[span].update(used[found.block[k]])
    assert sum(map(len, spans)) == len({address for own in used for address in own})


def test_interleaved_strides_that_do_not_divide_are_refused():
    """Every second and every third address in one hull: neither is a digit of the other."""
    columns = (np.zeros(2, np.int64), np.array([0, 1]), np.array([[3], [3]]), np.array([[2], [3]]))
    with pytest.raises(AddressLayoutError, match='neither divides the other'):
        check_addresses_apart(*columns)


# --------------------------------------------------------------------------------------------- merge


def _dense_blocks(parts, shape, second_strides):
    """Boxes of a parameter whose second view steps as given."""
    lower, upper = _columns(parts, len(shape))
    first_strides = np.array(row_major_strides(shape), np.int64).reshape(1, -1)
    second_strides = np.array(second_strides, np.int64).reshape(1, -1)
    extent = upper - lower
    rows = np.arange(len(parts))
    return BlockPairs(np.zeros(len(parts), np.int64), extent, (lower * first_strides).sum(axis=1),
                      np.repeat(first_strides, len(parts), 0), (lower * second_strides).sum(axis=1),
                      np.repeat(second_strides, len(parts), 0), rows)


def _moves(blocks):
    """What blocks say: every pair (kind, first address, second address)."""
    pairs = []
    for k in range(len(blocks.kind)):
        firsts = addresses(blocks.extent[k], blocks.first[k], blocks.first_strides[k])
        seconds = addresses(blocks.extent[k], blocks.second[k], blocks.second_strides[k])
        pairs += [(int(blocks.kind[k]), first, second) for first, second in zip(firsts.tolist(), seconds.tolist())]
    return sorted(pairs)


@settings(max_examples=200)
@given(tilings(), st.data())
def test_merging_keeps_every_address_and_joins_grids(case, data):
    (lower, upper), parts = case
    parts = [tuple(tuple(at - base for at, base in zip(bound, lower)) for bound in part) for part in parts]
    shape = tuple(high - low for low, high in zip(lower, upper))
    blocks = _dense_blocks(data.draw(st.permutations(parts)), shape, row_major_strides(shape))
    merged = merge_blocks(blocks)
    assert _moves(merged) == _moves(blocks)
    assert len(merged.kind) <= len(blocks.kind)
    assert merge_blocks(merged).kind.shape == merged.kind.shape


@given(st.integers(1, 4).flatmap(lambda axes: st.lists(st.integers(1, 3), min_size=axes, max_size=axes)), st.data())
def test_a_grid_of_blocks_becomes_one(shape, data):
    """Cut along every axis at every index, and stored with the axes in any order."""
    order = data.draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    for axis, stride in zip(order, row_major_strides([shape[axis] for axis in order])):
        strides[axis] = stride
    parts = [(at, tuple(index + 1 for index in at)) for at in itertools.product(*map(range, shape))]
    merged = merge_blocks(_dense_blocks(data.draw(st.permutations(parts)), shape, strides))
    assert len(merged.kind) == 1
    assert int(merged.extent.prod()) == len(parts)
    assert (merged.first[0], merged.second[0]) == (0, 0)


def test_merging_stops_at_kinds_gaps_and_limits():
    line = _dense_blocks([((k, ), (k + 1, )) for k in range(4)], (4, ), (1, ))
    assert len(merge_blocks(line).kind) == 1
    by_kind = BlockPairs(np.array([0, 0, 1, 1]), line.extent, line.first, line.first_strides, line.second,
                         line.second_strides, line.row)
    assert merge_blocks(by_kind).extent.tolist() == [[2], [2]]
    moved = np.array([0, 1, 9, 10])
    apart = BlockPairs(line.kind, line.extent, line.first, line.first_strides, moved, np.ones((4, 1), np.int64),
                       line.row)
    assert merge_blocks(apart).extent.tolist() == [[2], [2]]
    with pytest.raises(MergeLimitError):
        merge_blocks(line, max_checks=1)
    assert len(merge_blocks(line, max_passes=0).kind) == 4


def test_a_block_that_carries_over_everything_is_refused_instead_of_exploding():
    axes = 24
    strides = np.array([[4**axis for axis in reversed(range(axes))]])
    far = np.array([[1] * (axes - 1) + [2 * 4**axes]])
    with pytest.raises(AddressLayoutError, match='carry'):
        check_addresses_apart(np.zeros(2, np.int64), np.array([2 * int(strides.sum()), 0]),
                              np.concatenate([np.full((1, axes), 3), far]),
                              np.concatenate([strides, np.ones_like(strides)]))
