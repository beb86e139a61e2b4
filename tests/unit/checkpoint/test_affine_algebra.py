# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""concat, narrow, permute, relabel and compose: what the result stores, that it is tidy, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import affine_strategies
from affine_oracle import (NOTHING, check_map, contents_holders, count, element_holders, is_maximally_merged,
                           shard_element_ids, shard_scales)
from deepspeed.checkpoint.affine import (AffinePiece, ParamAffineMap, compose, concat_affine_maps,
                                         contiguous_split_map, keep_locations, narrow, permute, relabel,
                                         replicated_map, segmented_map, union_affine_maps, zero3_partition_map)


def _check(layout, exact=True):
    covering = all(contents_holders(count(layout.shape), layout.contents))
    check_map(layout.map, layout.contents, covering=covering, exact=exact)
    assert is_maximally_merged(layout.map)


def _at(map_, first):
    return relabel(map_, {location: first + location for location in map_.shard_shapes})


def _with_axes(kind):
    return affine_strategies.shapes(min_axes=1).flatmap(kind)


# ---------------------------------------------------------------------------------------------- concat


@settings(max_examples=200)
@given(_with_axes(affine_strategies.concatenations))
def test_concatenation(layout):
    _check(layout)


def test_fused_qkv_of_separate_projections():
    """Rank r of a server wants its q, k and v rows in one shard; a trainer holds three partitioned parameters."""
    q, k, v = (_at(zero3_partition_map((rows, 3), 2), first) for rows, first in ((4, 0), (2, 2), (2, 4)))
    fused = concat_affine_maps([q, k, v], 0)
    assert fused.logical_shape == (8, 3)
    assert fused.pieces_by_rank[0] == [AffinePiece((2, 3), 0, (3, 1), 0, (3, 1), {0})]
    assert fused.pieces_by_rank[1] == [AffinePiece((2, 3), 6, (3, 1), 0, (3, 1), {1})]
    assert fused.pieces_by_rank[3] == [AffinePiece((1, 3), 15, (3, 1), 0, (3, 1), {3})]
    assert fused.pieces_by_rank[5] == [AffinePiece((1, 3), 21, (3, 1), 0, (3, 1), {5})]
    assert fused.shard_shapes[0] == (6, )


def test_concatenation_along_columns_restrides_the_parameter_only():
    halves = [replicated_map((2, 3), 1), _at(replicated_map((2, 1), 1), 7)]
    whole = concat_affine_maps(halves, 1)
    assert whole.pieces_by_rank[0] == [AffinePiece((2, 3), 0, (4, 1), 0, (3, 1), {0})]
    assert whole.pieces_by_rank[7][0].source_offset == 3
    assert whole.shard_shapes == {0: (2, 3), 7: (2, 1)}


def test_concatenations_that_cannot_be_are_refused():
    one = replicated_map((2, 3), 1)
    with pytest.raises(ValueError, match='no maps|at least one'):
        concat_affine_maps([], 0)
    with pytest.raises(ValueError, match='[Ll]ocation 0 '):
        concat_affine_maps([one, one], 0)
    with pytest.raises(ValueError, match=r'\(2, 4\)'):
        concat_affine_maps([one, _at(replicated_map((2, 4), 1), 5)], 0)
    with pytest.raises(ValueError, match=r'\(2, 3, 1\)'):
        concat_affine_maps([one, _at(replicated_map((2, 3, 1), 1), 5)], 0)
    with pytest.raises(IndexError, match='dim is 2'):
        concat_affine_maps([one, _at(one, 5)], 2)
    with pytest.raises(IndexError, match='dim is 0'):
        concat_affine_maps([replicated_map((), 1), _at(replicated_map((), 1), 5)], 0)


# ---------------------------------------------------------------------------------------------- narrow


@settings(max_examples=200)
@given(_with_axes(affine_strategies.layouts), st.data())
def test_narrowing(layout, data):
    dim = data.draw(st.integers(0, len(layout.shape) - 1))
    start = data.draw(st.integers(0, layout.shape[dim]))
    length = data.draw(st.integers(0, layout.shape[dim] - start))
    narrowed = affine_strategies.narrowed(layout, dim, start, length)
    _check(narrowed, exact=False)
    assert dict(narrowed.map.shard_shapes) == dict(layout.map.shard_shapes)


def test_narrowing_a_column_split_by_hand():
    narrowed = narrow(contiguous_split_map((3, 6), [4, 2], 1), 1, 2, 3)
    assert narrowed.logical_shape == (3, 3)
    assert narrowed.pieces_by_rank[0] == [AffinePiece((3, 2), 0, (3, 1), 2, (4, 1), {0})]
    assert narrowed.pieces_by_rank[1] == [AffinePiece((3, 1), 2, (3, 1), 0, (2, 1), {1})]


def test_narrowing_back_what_was_concatenated():
    parts = [replicated_map((2, 3), 2), _at(zero3_partition_map((5, 3), 4), 10)]
    whole = concat_affine_maps(parts, 0)
    again = narrow(whole, 0, 2, 5)
    assert element_holders(again) == element_holders(parts[1])


@pytest.mark.parametrize('dim, start, length', [(0, -1, 2), (0, 0, 4), (0, 3, 1), (0, 1, -1)])
def test_a_slab_outside_the_parameter_is_refused(dim, start, length):
    with pytest.raises(ValueError, match='not within axis 0'):
        narrow(replicated_map((3, 2), 1), dim, start, length)


@pytest.mark.parametrize('dim', [2, -3])
def test_a_slab_of_an_axis_that_is_none_is_refused(dim):
    with pytest.raises(IndexError, match=f'narrow: dim is {dim}'):
        narrow(replicated_map((3, 2), 1), dim, 0, 1)


# --------------------------------------------------------------------------------------------- permute


@settings(max_examples=200)
@given(affine_strategies.shapes().flatmap(affine_strategies.layouts), st.data())
def test_permutation(layout, data):
    dims = data.draw(st.permutations(range(len(layout.shape))))
    permuted = affine_strategies.permuted(layout, dims)
    assert permuted.shape == tuple(layout.shape[dim] for dim in dims)
    _check(permuted)
    back = permute(permuted.map, np.argsort(dims).tolist())
    check_map(back, layout.contents)
    assert is_maximally_merged(back)


def test_permuting_by_hand():
    """The transpose of a row split: the same shards, whose columns are now the parameter's rows."""
    transposed = permute(contiguous_split_map((4, 3), [1, 3], 0), (1, 0))
    assert transposed.logical_shape == (3, 4)
    assert transposed.shard_shapes == {0: (1, 3), 1: (3, 3)}
    assert transposed.pieces_by_rank[1] == [AffinePiece((3, 3), 1, (4, 1), 0, (1, 3), {1})]


@pytest.mark.parametrize('dims', [(0, ), (0, 0), (0, 1, 1)])
def test_what_is_no_permutation_is_refused(dims):
    with pytest.raises(ValueError, match='no order'):
        permute(replicated_map((3, 2), 1), dims)


@pytest.mark.parametrize('dims', [(0, 2), (0, 1, 2), (1, -3)])
def test_a_permutation_of_axes_that_are_none_is_refused(dims):
    with pytest.raises(IndexError, match=r'permute: dims\['):
        permute(replicated_map((3, 2), 1), dims)


# --------------------------------------------------------------------------------------------- relabel


@settings(max_examples=100)
@given(affine_strategies.shapes().flatmap(affine_strategies.layouts), st.data())
def test_relabelling(layout, data):
    olds = sorted(layout.contents)
    news = data.draw(st.lists(st.integers(-10**12, 10**12), min_size=len(olds), max_size=len(olds), unique=True))
    relabelled = affine_strategies.relabelled(layout, dict(zip(olds, news)))
    check_map(relabelled.map, relabelled.contents)
    back = relabel(relabelled.map, dict(zip(news, olds)))
    assert back == layout.map


def test_relabelling_shares_the_columns():
    map_ = zero3_partition_map((7, 5), 6)
    moved = _at(map_, 100)
    for name in ('shape', 'source_offset', 'source_strides', 'dest_offset', 'dest_strides', 'set_members'):
        assert np.shares_memory(getattr(map_.columns, name), getattr(moved.columns, name))
    assert moved.columns.location_ids.tolist() == list(range(100, 106))


def test_swapping_two_locations():
    map_ = contiguous_split_map((3, 2), [1, 2], 0)
    swapped = relabel(map_, {0: 1, 1: 0})
    assert dict(swapped.shard_shapes) == {1: (1, 2), 0: (2, 2)}
    assert [piece.locations for piece in swapped.pieces_by_rank[0]] == [{0}]


def test_labels_that_collide_are_refused():
    with pytest.raises(ValueError, match='5'):
        relabel(contiguous_split_map((3, 2), [1, 2], 0), {0: 5, 1: 5})


# --------------------------------------------------------------------------------------------- compose


@settings(max_examples=250)
@given(affine_strategies.shapes().flatmap(affine_strategies.compositions))
def test_composition(layout):
    _check(layout)


@settings(max_examples=60)
@given(affine_strategies.shapes().flatmap(affine_strategies.simple_layouts))
def test_composition_with_whole_shards_changes_nothing_but_the_order(layout):
    inners = {
        location: relabel(replicated_map(shape, 1), {0: location})
        for location, shape in layout.map.shard_shapes.items()
    }
    composed = compose(layout.map, inners)
    check_map(composed, layout.contents)
    assert composed == union_affine_maps([layout.map])


def test_partitions_of_a_column_shard_by_hand():
    """ZeRO-3 over two ranks on each half of a column split: rows of the halves, each its own flat shard."""
    outer = contiguous_split_map((2, 6), [4, 2], 1)
    composed = compose(outer, {0: zero3_partition_map((2, 4), 2), 1: _at(zero3_partition_map((2, 2), 2), 2)})
    assert composed.shard_shapes == {0: (4, ), 1: (4, ), 2: (2, ), 3: (2, )}
    where = {
        location: [(piece.source_offset, piece.numel) for piece in composed.pieces_by_rank[location]]
        for location in range(4)
    }
    assert where == {0: [(0, 4)], 1: [(6, 4)], 2: [(4, 2)], 3: [(10, 2)]}


def test_partitions_of_a_flat_shard_that_is_transposed_by_hand():
    """The shard stores columns one after the other; ZeRO-3 over four ranks gives one column to each of three."""
    outer = ParamAffineMap((2, 3), {0: (6, )}, {0: [AffinePiece((2, 3), 0, (3, 1), 0, (1, 2), {0})]})
    composed = compose(outer, {0: _at(zero3_partition_map((6, ), 4), 10)})
    assert composed.shard_shapes == {10: (2, ), 11: (2, ), 12: (2, ), 13: (0, )}
    stored = {location: ids.tolist() for location, ids in shard_element_ids(composed).items()}
    assert stored == {10: [0, 3], 11: [1, 4], 12: [2, 5], 13: []}


def test_composition_of_a_replicated_parameter_joins_its_holders():
    """Two TP ranks hold the bias whole and each partitions it: the partitions of the two are replicas."""
    outer = replicated_map((6, ), 2)
    composed = compose(outer, {0: zero3_partition_map((6, ), 2), 1: _at(zero3_partition_map((6, ), 3), 10)})
    assert element_holders(composed) == [{0, 10}, {0, 10}, {0, 11}, {1, 11}, {1, 12}, {1, 12}]
    check_map(composed)


def test_factors_multiply():
    outer = replicated_map((4, ), 1, scale=0.5)
    composed = compose(outer, {0: replicated_map((4, ), 2, scale=0.25)})
    assert {location: set(scales) for location, scales in shard_scales(composed).items()} == {0: {0.125}, 1: {0.125}}


def test_compositions_that_cannot_be_are_refused():
    outer = contiguous_split_map((4, 3), [1, 3], 0)
    inner = zero3_partition_map((1, 3), 2)
    with pytest.raises(ValueError, match='1'):
        compose(outer, {0: inner, 1: _at(inner, 10)})
    with pytest.raises(ValueError, match='5'):
        compose(outer, {5: inner})
    with pytest.raises(ValueError, match='[Ll]ocation'):
        compose(outer, {0: inner, 1: zero3_partition_map((3, 3), 2)})


def test_arguments_of_another_type_are_refused():
    split = contiguous_split_map((4, 3), [1, 3], 0)
    for call, what in [
        (lambda: concat_affine_maps([split, None], 0), 'concat_affine_maps: map 1 must be a ParamAffineMap'),
        (lambda: narrow(None, 0, 0, 1), 'narrow: affine_map must be a ParamAffineMap'),
        (lambda: permute(split.to_dict(), (1, 0)), 'permute: affine_map must be a ParamAffineMap'),
        (lambda: relabel('split', {}), 'relabel: affine_map must be a ParamAffineMap'),
        (lambda: relabel(split, [1]), 'relabel: new_ids must be a mapping'),
        (lambda: compose(None, {}), 'compose: outer must be a ParamAffineMap'),
        (lambda: compose(split, [split]), 'compose: inner_maps must be a mapping'),
        (lambda: compose(split, {0: None}), r'compose: inner_maps\[0\] must be a ParamAffineMap, but it is None'),
    ]:
        with pytest.raises(TypeError, match=what):
            call()


# ------------------------------------------------------------------------------------- one after another


@st.composite
def towers(draw):
    """A layout to which two or three operations are applied."""
    layout = draw(_with_axes(affine_strategies.layouts))
    for _ in range(draw(st.integers(2, 3))):
        dim = draw(st.integers(0, len(layout.shape) - 1))
        step = draw(st.sampled_from(['narrow', 'permute', 'concat', 'union', 'relabel']))
        if step == 'narrow':
            start = draw(st.integers(0, layout.shape[dim]))
            length = draw(st.integers(0, layout.shape[dim] - start))
            layout = affine_strategies.narrowed(layout, dim, start, length)
        elif step == 'permute':
            layout = affine_strategies.permuted(layout, draw(st.permutations(range(len(layout.shape)))))
        elif step == 'relabel':
            layout, = draw(affine_strategies.apart([layout]))
        else:
            other = draw(affine_strategies.simple_layouts(layout.shape))
            both = draw(affine_strategies.apart([layout, other]))
            layout = (affine_strategies.concatenation_of(both, dim)
                      if step == 'concat' else affine_strategies.union_of(both))
    return layout


@settings(max_examples=200)
@given(towers())
def test_operations_compose(layout):
    check_map(layout.map, layout.contents, covering=False, exact=False)


def test_grouped_query_attention_end_to_end():
    """Queries split and keys replicated inside one fused parameter, partitioned by ZeRO-3 per TP rank."""
    fused = segmented_map((6, 2), [(4, False), (2, True)], 0, 2, [[2, 2]])
    composed = compose(fused, {rank: _at(zero3_partition_map((4, 2), 3), 10 * rank) for rank in range(2)})
    holders = element_holders(composed)
    assert holders[8] == {1, 11} and holders[9] == {1, 11}
    assert holders[10] == {2, 12} and holders[0] == {0} and holders[4] == {10}
    check_map(composed)


def test_nothing_is_made_of_the_size_of_a_huge_parameter():
    shape = (2**20, 2**20)
    outer = contiguous_split_map(shape, [2**19, 2**19], 1)
    inner = {rank: _at(zero3_partition_map((2**20, 2**19), 5), 10 * rank) for rank in range(2)}
    composed = compose(outer, inner)
    transposed = permute(narrow(composed, 0, 7, 2**20 - 7), (1, 0))
    assert transposed.logical_shape == (2**20, 2**20 - 7)
    held = sum(piece.numel for pieces in transposed.pieces_by_rank.values() for piece in pieces)
    assert held == 2**20 * (2**20 - 7)


def test_an_address_that_a_narrowed_map_does_not_describe_is_nothing():
    layout = affine_strategies.Layout('replicated', replicated_map((4, ), 1), {0: np.arange(4)})
    narrowed = affine_strategies.narrowed(layout, 0, 1, 2)
    assert narrowed.contents[0].tolist() == [NOTHING, 0, 1, NOTHING]
    assert ParamAffineMap((2, ), {0: (4, )}, {0: [AffinePiece((2, ), 0, (1, ), 1, (1, ), {0})]}) == narrowed.map


# ---------------------------------------------------------------------------------------------- keep_locations


@given(affine_strategies.shapes().flatmap(affine_strategies.layouts), st.data())
def test_kept_shards_stay_as_they_are_and_name_only_each_other(layout, data):
    kept = data.draw(st.sets(st.sampled_from(sorted(layout.contents))))
    survivors = keep_locations(layout.map, kept)
    assert set(survivors.shard_shapes) == kept
    assert {rank: ids.tolist() for rank, ids in shard_element_ids(survivors).items()} == \
        {rank: layout.contents[rank].tolist() for rank in kept}
    for pieces in survivors.pieces_by_rank.values():
        assert all(piece.locations <= kept for piece in pieces)
    whole = element_holders(layout.map)
    assert list(element_holders(survivors)) == [ranks & kept for ranks in whole]


@given(affine_strategies.shapes().flatmap(affine_strategies.layouts), st.data())
def test_parts_of_a_layout_unite_to_its_holders(layout, data):
    first = data.draw(st.sets(st.sampled_from(sorted(layout.contents))))
    parts = [keep_locations(layout.map, part) for part in (first, set(layout.contents) - first)]
    assert element_holders(union_affine_maps(parts)) == element_holders(layout.map)


def test_keeping_a_location_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match='no shard at location 7'):
        keep_locations(contiguous_split_map((4, 2), [2, 2], 0), [1, 7])
