# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Every constructor against numpy slicing of a real array, and what constructors refuse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import affine_strategies
from affine_oracle import check_map, count, element_grid, is_maximally_merged
from deepspeed.checkpoint.affine import (AffinePiece, ParamAffineMap, block_gather_map, flat_partition_map,
                                         location_ids, replicated_map, segmented_map, sub_param_map,
                                         zero3_partition_map)


def _with_axes(kind):
    return affine_strategies.shapes(min_axes=1).flatmap(kind)


@settings(max_examples=60)
@given(affine_strategies.shapes().flatmap(affine_strategies.replicated))
def test_replicated(layout):
    check_map(layout.map, layout.contents)


@settings(max_examples=100)
@given(_with_axes(affine_strategies.splits))
def test_contiguous_split(layout):
    check_map(layout.map, layout.contents)


@settings(max_examples=100)
@given(_with_axes(affine_strategies.sub_params))
def test_sub_param(layout):
    check_map(layout.map, layout.contents)


@settings(max_examples=100)
@given(_with_axes(affine_strategies.segmented))
def test_segmented(layout):
    check_map(layout.map, layout.contents)


@settings(max_examples=100)
@given(_with_axes(affine_strategies.block_gathers))
def test_block_gather(layout):
    check_map(layout.map, layout.contents)


@settings(max_examples=150)
@given(affine_strategies.shapes().flatmap(affine_strategies.zero3))
def test_zero3_partition(layout):
    check_map(layout.map, layout.contents)
    assert is_maximally_merged(layout.map)
    assert all(len(shape) == 1 for shape in layout.map.shard_shapes.values())
    most = max(1, 2 * len(layout.shape) - 1)
    assert all(len(pieces) <= most for pieces in layout.map.pieces_by_rank.values())


@settings(max_examples=100)
@given(affine_strategies.shapes().flatmap(affine_strategies.flat_partitions))
def test_flat_partition(layout):
    check_map(layout.map, layout.contents)
    assert is_maximally_merged(layout.map)


@settings(max_examples=100)
@given(
    _with_axes(lambda shape: st.one_of([
        kind(shape) for kind in (affine_strategies.transposed_shards, affine_strategies.partially_replicated,
                                 affine_strategies.box_partitions, affine_strategies.unequal_replicas)
    ])))
def test_layouts_written_by_hand_are_what_they_say(layout):
    check_map(layout.map, layout.contents)


@settings(max_examples=100)
@given(affine_strategies.shapes().flatmap(affine_strategies.simple_layouts))
def test_validation_accepts_what_the_oracle_accepts(layout):
    layout.map.validate()
    layout.map.validate_coverage()
    assert layout.map.uncovered_offsets() == []


@settings(max_examples=100)
@given(affine_strategies.shapes().flatmap(affine_strategies.simple_layouts), st.data())
def test_a_lost_location_is_noticed(layout, data):
    """What the survivors do not hold is what the library says, element by element."""
    kept = data.draw(st.sets(st.sampled_from(sorted(layout.contents))))
    left = affine_strategies.surviving(layout, kept)
    held = {element for shard in left.contents.values() for element in shard.tolist()}
    missing = [element for element in range(count(layout.shape)) if element not in held]
    assert left.map.uncovered_offsets() == missing
    if missing:
        with pytest.raises(ValueError):
            left.map.validate_coverage()
    else:
        left.map.validate_coverage()


def test_zero3_by_hand():
    """14 elements over 4 ranks: 4, 4, 4, 2. Rank 1 starts inside row 0 and ends with row 1's first element."""
    map_ = zero3_partition_map((2, 7), 4)
    assert map_.shard_shapes == {0: (4, ), 1: (4, ), 2: (4, ), 3: (2, )}
    assert map_.pieces_by_rank[0] == [AffinePiece((1, 4), 0, (7, 1), 0, (7, 1), {0})]
    assert map_.pieces_by_rank[1] == [
        AffinePiece((1, 3), 4, (7, 1), 0, (7, 1), {1}),
        AffinePiece((1, 1), 7, (7, 1), 3, (7, 1), {1})
    ]
    assert map_.pieces_by_rank[3] == [AffinePiece((1, 2), 12, (7, 1), 0, (7, 1), {3})]


def test_zero3_with_more_ranks_than_elements():
    map_ = zero3_partition_map((), 3)
    assert map_.shard_shapes == {0: (1, ), 1: (0, ), 2: (0, )}
    assert [len(map_.pieces_by_rank.get(rank, ())) for rank in range(3)] == [1, 0, 0]
    check_map(map_)


def test_replica_groups_hold_the_same_runs():
    map_ = zero3_partition_map((5, ), 2, locations=[[7, 3], [4, 9]])
    assert {
        location: map_.pieces_by_rank[location][0].locations
        for location in (7, 3, 4, 9)
    } == {
        7: {7, 4},
        4: {7, 4},
        3: {3, 9},
        9: {3, 9}
    }
    assert map_.shard_shapes == {7: (3, ), 3: (2, ), 4: (3, ), 9: (2, )}


def test_equal_flat_runs_are_replicas():
    map_ = flat_partition_map((3, 2), [(0, 4), (4, 6), (0, 4)])
    assert map_.pieces_by_rank[0][0].locations == {0, 2}
    assert map_.pieces_by_rank[1][0].locations == {1}
    check_map(map_)


def test_flat_runs_that_overlap_in_part_are_refused():
    with pytest.raises(ValueError, match='overlap in part'):
        flat_partition_map((3, 2), [(0, 4), (3, 6)])


@pytest.mark.parametrize('bounds', [[(0, 7)], [(-1, 3)], [(4, 2)], [(0, 2, 4)]])
def test_flat_bounds_outside_the_parameter_are_refused(bounds):
    with pytest.raises(ValueError, match=r'bounds\[0\]'):
        flat_partition_map((3, 2), bounds)


@pytest.mark.parametrize('locations', [[0, 0], [0], [[0, 1], [2]], [[0, 1], [1, 2]]])
def test_locations_that_do_not_fit_are_refused(locations):
    with pytest.raises(ValueError, match='[Ll]ocation'):
        zero3_partition_map((3, 2), 2, locations=locations)
    with pytest.raises(ValueError, match='[Ll]ocation'):
        flat_partition_map((3, 2), [(0, 3), (3, 6)], locations=locations)


@pytest.mark.parametrize('world_size', [0, -1])
def test_a_world_of_no_ranks_is_refused(world_size):
    with pytest.raises(ValueError, match='world_size'):
        zero3_partition_map((3, 2), world_size)


def test_widths_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match='do not account for'):
        segmented_map((6, 3), [(4, False), (2, True)], 0, 2, [[2, 1]])
    with pytest.raises(ValueError, match='split_widths'):
        segmented_map((6, 3), [(4, False), (2, False)], 0, 2, [[2, 2]])
    with pytest.raises(ValueError, match='shard_widths'):
        sub_param_map((6, 3), [4, 2], [[2, 2]], 0)


def test_ranks_keep_their_empty_shards_where_there_are_no_segments():
    empty = segmented_map((6, 3), [], 0, 2, [])
    assert empty == ParamAffineMap((6, 3), {0: (0, 3), 1: (0, 3)}, {0: [], 1: []})
    assert list(empty.to_dict()['ranks']) == [0, 1]
    empty.validate()


@pytest.mark.parametrize('ranks', [2**24 + 1, 2**45, 2**70, -1])
@pytest.mark.parametrize('make', [
    lambda ranks: replicated_map((4, ), ranks),
    lambda ranks: segmented_map((4, ), [(4, True)], 0, ranks, []),
    lambda ranks: zero3_partition_map((4, ), ranks),
])
def test_numbers_of_ranks_that_no_job_has_are_refused(make, ranks):
    with pytest.raises(ValueError, match=r'(tp_degree|world_size) is .* between [01] and 2\*\*24'):
        make(ranks)


def test_blocks_must_be_given_by_location():
    with pytest.raises(TypeError, match='block_ids_by_rank must be a mapping'):
        block_gather_map((8, 2), [[0, 1], [2, 3]], 2, 0)


@pytest.mark.parametrize('scale', [0.0, float('nan'), float('inf'), -float('inf'), 10**400])
def test_a_scale_that_cannot_be_undone_is_refused(scale):
    with pytest.raises(ValueError, match='not invertible'):
        replicated_map((3, ), 2, scale)


def test_gathered_neighbours_are_one_piece():
    map_ = block_gather_map((8, 3), {5: [2, 3, 0], 6: [1]}, 2, 0)
    assert map_.shard_shapes == {5: (6, 3), 6: (2, 3)}
    assert map_.pieces_by_rank[5] == [
        AffinePiece((4, 3), 12, (3, 1), 0, (3, 1), {5}),
        AffinePiece((2, 3), 0, (3, 1), 12, (3, 1), {5})
    ]


def test_labels_become_ids_in_their_order():
    labels = [(name, rank) for name in 'qkv' for rank in range(2)]
    ids = location_ids(labels)
    assert [ids[label] for label in labels] == list(range(6))
    with pytest.raises(ValueError, match='twice'):
        location_ids([*labels, ('k', 1)])


def test_a_huge_parameter_is_exact_and_costs_nothing():
    """2**40 elements over three ranks: nothing of that size is made."""
    map_ = zero3_partition_map((2**20, 2**20), 3)
    chunk = (2**40 + 2) // 3
    held = [sum(piece.numel for piece in map_.pieces_by_rank[rank]) for rank in range(3)]
    assert held == [chunk, chunk, 2**40 - 2 * chunk]
    map_.validate()
    map_.validate_coverage()


def test_real_tensors_agree_with_the_oracle():
    """``extract`` of an arange is the contents, so the oracle's numpy slicing and torch's views mean the same."""
    shape = (4, 6)
    full = torch.from_numpy(element_grid(shape))
    map_ = sub_param_map(shape, [2, 4], [[1, 1], [3, 1]], 1)
    for rank in map_.shard_shapes:
        expected = torch.cat([full[:, :2].split([1, 1], 1)[rank], full[:, 2:].split([3, 1], 1)[rank]], dim=1)
        assert torch.equal(map_.extract(full, rank), expected)
