# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Layouts that hold one parameter at once: what the union stores, who it says holds what, and what it refuses."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import affine_strategies
from affine_oracle import (NOTHING, assert_same_contents, check_map, contents_holders, count, element_holders,
                           is_maximally_merged, piece_elements, shard_element_ids, shard_scales)
from deepspeed.checkpoint.affine import (AffinePiece, ParamAffineMap, contiguous_split_map, relabel, replicated_map,
                                         union_affine_maps, zero3_partition_map)


def _at(map_, first):
    """The same map with its locations counted from ``first``."""
    return relabel(map_, {location: first + location for location in map_.shard_shapes})


def _covering(layout):
    return all(contents_holders(count(layout.shape), layout.contents))


# ------------------------------------------------------------------------------------------ any layouts


@settings(max_examples=300)
@given(affine_strategies.shapes().flatmap(affine_strategies.unions))
def test_union_stores_what_its_parts_store_and_names_all_holders(layout):
    check_map(layout.map, layout.contents, covering=_covering(layout))
    assert is_maximally_merged(layout.map)


@st.composite
def three_apart(draw):
    shape = draw(affine_strategies.shapes())
    return draw(affine_strategies.apart([draw(affine_strategies.simple_layouts(shape)) for _ in range(3)]))


@settings(max_examples=100)
@given(three_apart())
def test_three_layouts_have_the_same_holders_in_all_six_orders(layouts):
    contents = {location: shard for layout in layouts for location, shard in layout.contents.items()}
    holders = contents_holders(count(layouts[0].shape), contents)
    for order in itertools.permutations(layouts):
        merged = union_affine_maps([layout.map for layout in order])
        assert element_holders(merged) == holders
        check_map(merged, contents)
    one, two, three = (layout.map for layout in layouts)
    for nested in (union_affine_maps([union_affine_maps([one, two]),
                                      three]), union_affine_maps([one, union_affine_maps([two, three])])):
        assert element_holders(nested) == holders
        check_map(nested, contents)


@st.composite
def zero3_with_surviving_rows_and_columns(draw):
    shape = draw(affine_strategies.shapes(min_axes=2))
    rows, columns = (affine_strategies.Layout('split', contiguous_split_map(shape, sizes, dim),
                                              affine_strategies.split_contents(shape, sizes, dim))
                     for dim, sizes in ((0, draw(affine_strategies.cuts(shape[0], 3))),
                                        (1, draw(affine_strategies.cuts(shape[1], 3)))))
    kept = [draw(st.sets(st.integers(0, 2), min_size=1)) for _ in range(2)]
    parts = [draw(affine_strategies.zero3(shape)), *map(affine_strategies.surviving, (rows, columns), kept)]
    return draw(affine_strategies.apart(parts))


@settings(max_examples=150)
@given(zero3_with_surviving_rows_and_columns())
def test_holders_are_those_of_the_partitions_and_of_the_survivors(parts):
    merged = union_affine_maps([part.map for part in parts])
    numel = count(parts[0].shape)
    separately = [contents_holders(numel, part.contents) for part in parts]
    expected = [set.union(*sets) for sets in zip(*separately)]
    assert element_holders(merged) == expected
    assert {element: set(held) for element, held in merged.holders().items()} == dict(enumerate(expected))
    for pieces in merged.pieces_by_rank.values():
        for piece in pieces:
            assert all(expected[element] == set(piece.locations) for element in piece_elements(piece).tolist())


@settings(max_examples=100)
@given(
    affine_strategies.shapes(min_axes=1).flatmap(
        lambda shape: st.tuples(affine_strategies.unequal_replicas(shape), affine_strategies.zero3(shape))), st.data())
def test_replicas_whole_and_in_halves_with_partitions(pair, data):
    layout = affine_strategies.union_of(data.draw(affine_strategies.apart(pair)))
    check_map(layout.map, layout.contents)
    assert is_maximally_merged(layout.map)


@settings(max_examples=100)
@given(
    affine_strategies.shapes().flatmap(lambda shape: st.lists(
        affine_strategies.scaled_layouts(shape, st.sampled_from([1.0, 0.5, 2.0])), min_size=1, max_size=3)), st.data())
def test_union_keeps_factors_apart(parts, data):
    parts = data.draw(affine_strategies.apart(parts))
    merged = affine_strategies.union_of(parts)
    check_map(merged.map, merged.contents)
    found = shard_scales(merged.map)
    for part in parts:
        for location, scales in shard_scales(part.map).items():
            assert np.array_equal(found[location], scales)
    assert is_maximally_merged(merged.map)


@settings(max_examples=60)
@given(affine_strategies.shapes().flatmap(affine_strategies.simple_layouts))
def test_union_of_one_layout_only_tidies_it(layout):
    tidied = union_affine_maps([layout.map])
    check_map(tidied, layout.contents)
    assert is_maximally_merged(tidied)
    assert union_affine_maps([tidied]) == tidied
    assert dict(tidied.shard_shapes) == dict(layout.map.shard_shapes)


# --------------------------------------------------------------------------------------------- by hand


def test_rows_meet_columns():
    """2 x 4, one row per partition, with the left and right halves surviving: every quarter has two holders."""
    merged = union_affine_maps([zero3_partition_map((2, 4), 2), _at(contiguous_split_map((2, 4), [2, 2], 1), 10)])
    expected = {
        0: [AffinePiece((1, 2), 0, (4, 1), 0, (4, 1), {0, 10}),
            AffinePiece((1, 2), 2, (4, 1), 2, (4, 1), {0, 11})],
        1: [AffinePiece((1, 2), 4, (4, 1), 0, (4, 1), {1, 10}),
            AffinePiece((1, 2), 6, (4, 1), 2, (4, 1), {1, 11})],
        10: [AffinePiece((1, 2), 0, (4, 1), 0, (2, 1), {0, 10}),
             AffinePiece((1, 2), 4, (4, 1), 2, (2, 1), {1, 10})],
        11: [AffinePiece((1, 2), 2, (4, 1), 0, (2, 1), {0, 11}),
             AffinePiece((1, 2), 6, (4, 1), 2, (2, 1), {1, 11})],
    }
    assert set(merged.pieces_by_rank) == set(expected)
    for location, pieces in expected.items():
        found = merged.pieces_by_rank[location]
        described = [(piece.shape, piece.source_offset, piece.dest_offset, piece.locations) for piece in pieces]
        assert sorted((piece.shape, piece.source_offset, piece.dest_offset, piece.locations)
                      for piece in found) == sorted(described)


def test_a_block_of_several_rows_is_cut_at_a_column_edge_without_losing_its_strides():
    merged = union_affine_maps([zero3_partition_map((4, 6), 2), _at(contiguous_split_map((4, 6), [2, 4], 1), 10)])
    left = [piece for piece in merged.pieces_by_rank[1] if 10 in piece.locations]
    assert left == [AffinePiece((2, 2), 12, (6, 1), 0, (6, 1), {1, 10})]
    right = [piece for piece in merged.pieces_by_rank[1] if 11 in piece.locations]
    assert right == [AffinePiece((2, 4), 14, (6, 1), 2, (6, 1), {1, 11})]


def test_transposed_shard_is_a_block_with_permuted_strides():
    """A shard that stores the transpose, its piece written in the shard's order of axes."""
    transposed = ParamAffineMap((2, 3), {5: (3, 2)}, {5: [AffinePiece((3, 2), 0, (1, 3), 0, (2, 1), {5})]})
    merged = union_affine_maps([replicated_map((2, 3), 1), transposed])
    assert merged.pieces_by_rank[5] == [AffinePiece((2, 3), 0, (3, 1), 0, (1, 2), {0, 5})]
    assert merged.pieces_by_rank[0] == [AffinePiece((2, 3), 0, (3, 1), 0, (3, 1), {0, 5})]


def test_element_by_element_pieces_become_one():
    strides = (6, 2, 1)
    cells = [(i, j, k) for i in range(2) for j in range(3) for k in range(2)]
    pieces = [AffinePiece((1, 1, 1), *2 * (sum(a * b for a, b in zip(cell, strides)), strides), {0}) for cell in cells]
    merged = union_affine_maps([ParamAffineMap((2, 3, 2), {0: (2, 3, 2)}, {0: pieces[::-1]})])
    assert merged.pieces_by_rank[0] == [AffinePiece((2, 3, 2), 0, strides, 0, strides, {0})]


def test_a_part_of_the_parameter_is_legal():
    survivors = ParamAffineMap((4, 2), {1: (2, 2)}, {1: [AffinePiece((2, 2), 4, (2, 1), 0, (2, 1), {1})]})
    merged = union_affine_maps([survivors, ParamAffineMap((4, 2), {2: (0, 2)}, {2: []})])
    assert element_holders(merged) == [set()] * 4 + [{1}] * 4
    assert dict(merged.shard_shapes) == {1: (2, 2), 2: (0, 2)}
    assert merged.uncovered_offsets() == [0, 1, 2, 3]


def test_inputs_are_not_changed():
    parts = [zero3_partition_map((5, 3), 4), _at(contiguous_split_map((5, 3), [1, 2], 1), 10)]
    before = [part.to_dict() for part in parts]
    union_affine_maps(parts)
    assert [part.to_dict() for part in parts] == before


def test_pieces_follow_the_blocks_and_not_the_ranks_they_are_cut_by():
    """512 partitions of whole rows, eight columns: eight pieces per partition, and one per partition in a column."""
    merged = union_affine_maps(
        [zero3_partition_map((1024, 64), 512),
         _at(contiguous_split_map((1024, 64), [8] * 8, 1), 1000)])
    assert {len(merged.pieces_by_rank[rank]) for rank in range(512)} == {8}
    assert {len(merged.pieces_by_rank[1000 + rank]) for rank in range(8)} == {512}


def test_a_huge_parameter_is_united_without_being_made():
    shape = (2**20, 2**20)
    merged = union_affine_maps([zero3_partition_map(shape, 3), _at(contiguous_split_map(shape, [2**19] * 2, 1), 10)])
    assert sum(piece.numel for piece in merged.pieces_by_rank[10]) == 2**39
    merged.validate_coverage()


# -------------------------------------------------------------------------------------------- refusals


def test_no_maps_are_refused():
    with pytest.raises(ValueError, match='no maps|at least one'):
        union_affine_maps([])


def test_one_location_in_two_layouts_is_refused():
    with pytest.raises(ValueError, match='[Ll]ocation 1 '):
        union_affine_maps([replicated_map((3, 2), 2), _at(zero3_partition_map((3, 2), 2), 1)])


def test_different_parameters_are_refused():
    with pytest.raises(ValueError, match=r'\(3, 2\).*\(2, 3\)|\(2, 3\).*\(3, 2\)'):
        union_affine_maps([replicated_map((3, 2), 1), _at(replicated_map((2, 3), 1), 5)])


def _one_piece(piece, shard=(2, )):
    return ParamAffineMap((3, 4), {9: shard}, {9: [piece]})


@pytest.mark.parametrize('strides, offset', [((5, ), 0), ((3, ), 1), ((0, ), 0), ((-1, ), 3), ((2, ), 0)])
def test_a_piece_that_is_no_block_of_the_parameter_is_refused(strides, offset):
    """A diagonal, an anti-diagonal, one element twice, a row backwards, every second column."""
    piece = AffinePiece((2, ), offset, strides, 0, (1, ), {9})
    with pytest.raises(ValueError, match='9'):
        union_affine_maps([replicated_map((3, 4), 1), _one_piece(piece)])


@pytest.mark.parametrize('shape, offset, strides', [((3, ), 2, (1, )), ((1, 3), 2, (4, 1)), ((2, 2), 3, (4, 1)),
                                                    ((6, ), 0, (1, )), ((2, 2), 8, (4, 1)), ((1, ), 12, (1, ))])
def test_a_run_that_wraps_into_the_next_row_or_leaves_the_parameter_is_refused(shape, offset, strides):
    piece = AffinePiece(shape, offset, strides, 0, (2, 1)[-len(shape):], {9})
    with pytest.raises(ValueError, match='9'):
        union_affine_maps([replicated_map((3, 4), 1), _one_piece(piece, (count(shape), ))])


def test_strides_of_another_length_are_refused():
    with pytest.raises(ValueError, match='strid'):
        union_affine_maps([_one_piece(AffinePiece((2, ), 0, (4, 1), 0, (1, ), {9}))])


def test_pieces_without_a_shard_shape_are_refused():
    with pytest.raises(ValueError, match='no shard shape'):
        union_affine_maps([ParamAffineMap((3, 4), {}, {9: [AffinePiece((1, 2), 0, (4, 1), 0, (2, 1), {9})]})])


def test_oracle_sees_unfilled_addresses():
    """The oracle itself: a shard with a hole, and two pieces at one address."""
    hole = _one_piece(AffinePiece((1, 1), 0, (4, 1), 1, (1, 1), {9}))
    assert_same_contents(shard_element_ids(hole), {9: np.array([NOTHING, 0])})
    with pytest.raises(AssertionError, match='unfilled'):
        check_map(hole, covering=False)
    twice = ParamAffineMap((3, 4), {9: (2, )}, {9: [AffinePiece((1, 2), 0, (4, 1), 0, (0, 0), {9})]})
    with pytest.raises(AssertionError, match='one address'):
        shard_element_ids(twice)
