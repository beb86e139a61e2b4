# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Plans against an element-level oracle, small plans derived by hand, replica choice, budgets and refusals."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import affine_strategies
from affine_oracle import (NOTHING, addresses, check_plan, contents_holders, count, run_plan, run_plan_on_tensors,
                           shard_scales)
from deepspeed.checkpoint.affine import (AffinePiece, ParamAffineMap, block_gather_map, concat_affine_maps,
                                         contiguous_split_map, flat_partition_map, narrow, permute, relabel,
                                         replicated_map, sub_param_map, union_affine_maps, zero3_partition_map)
from deepspeed.checkpoint.affine_transfer import (AffineTransferError, InvalidMapError, InvalidReplicaPolicyError,
                                                  PlanBudget, TransferEndpoints, TransferPlan, TransferSegment,
                                                  UnsupportedLayoutError, plan_transfer)


def _at(map_, first):
    return relabel(map_, {location: first + location for location in map_.shard_shapes})


def _pairs(shapes, sources, targets):
    return shapes.flatmap(lambda shape: st.tuples(sources(shape), targets(shape)))


_ANY = affine_strategies.shapes()
_AXES = affine_strategies.shapes(min_axes=1)


def _plan_and_check(source, target, **options):
    plan = plan_transfer(target.map, source.map, **options)
    check_plan(plan, target.contents, source.contents)
    assert dict(plan.source_numel) == {location: len(shard) for location, shard in source.contents.items()}
    assert dict(plan.target_numel) == {location: len(shard) for location, shard in target.contents.items()}
    return plan


# ------------------------------------------------------------------ every plan is exact, none is refused


@settings(max_examples=600)
@given(_pairs(_ANY, affine_strategies.layouts, affine_strategies.layouts))
def test_any_layout_into_any_other(pair):
    _plan_and_check(*pair)


@settings(max_examples=300)
@given(_pairs(_ANY, affine_strategies.constructor_layouts, affine_strategies.constructor_layouts))
def test_any_constructor_into_any_other(pair):
    _plan_and_check(*pair)


@settings(max_examples=250)
@given(_pairs(_ANY, affine_strategies.flat_layouts, affine_strategies.block_layouts), st.booleans())
def test_flat_shards_out_of_and_into_blocks(pair, reverse):
    _plan_and_check(*(reversed(pair) if reverse else pair))


@settings(max_examples=100)
@given(_pairs(_ANY, affine_strategies.flat_layouts, affine_strategies.flat_layouts))
def test_flat_shards_into_flat_shards(pair):
    _plan_and_check(*pair)


@settings(max_examples=300)
@given(_pairs(_ANY, affine_strategies.unions, affine_strategies.simple_layouts))
def test_unions_into_anything(pair):
    _plan_and_check(*pair)


@settings(max_examples=200)
@given(_pairs(_AXES, affine_strategies.concatenations, affine_strategies.simple_layouts), st.booleans())
def test_concatenations_from_and_into_anything(pair, reverse):
    _plan_and_check(*(reversed(pair) if reverse else pair))


@settings(max_examples=150)
@given(_pairs(_AXES, affine_strategies.narrowings, affine_strategies.layouts))
def test_narrowed_maps_as_sources(pair):
    _plan_and_check(*pair)


@settings(max_examples=150)
@given(_pairs(_AXES, affine_strategies.layouts, affine_strategies.narrowings))
def test_narrowed_maps_as_partial_targets(pair):
    """Only what the target describes is written; ``check_plan`` sees every other address untouched."""
    source, target = pair
    if all((shard != NOTHING).all() for shard in target.contents.values()):
        _plan_and_check(source, target)
    else:
        with pytest.raises(InvalidMapError):
            plan_transfer(target.map, source.map)
    _plan_and_check(source, target, partial_targets=True)


@settings(max_examples=60)
@given(_pairs(_AXES, affine_strategies.layouts, affine_strategies.simple_layouts), st.data())
def test_a_part_of_the_parameter_as_partial_target(pair, data):
    source, target = pair
    some = data.draw(st.sets(st.sampled_from(sorted(target.contents))))
    some = affine_strategies.surviving(target, some)
    _plan_and_check(source, some, partial_targets=True)
    if not all(contents_holders(count(target.shape), some.contents)):
        with pytest.raises(InvalidMapError):
            plan_transfer(some.map, source.map)


# ------------------------------------------------------------------------ partitions and surviving shards


@st.composite
def trainings(draw):
    """ZeRO-3 partitions, surviving row shards and surviving column shards, and a split target."""
    shape = draw(affine_strategies.shapes(min_axes=2))

    def split(dim):
        sizes = draw(affine_strategies.cuts(shape[dim], 3))
        return affine_strategies.Layout(f'split(dim={dim}, sizes={sizes})', contiguous_split_map(shape, sizes, dim),
                                        affine_strategies.split_contents(shape, sizes, dim))

    survivors = [
        affine_strategies.surviving(split(dim), draw(st.sets(st.integers(0, 2), min_size=1))) for dim in (0, 1)
    ]
    parts = draw(affine_strategies.apart([draw(affine_strategies.zero3(shape)), *survivors]))
    return parts, affine_strategies.union_of(parts), split(draw(st.integers(0, 1)))


@settings(max_examples=200)
@given(trainings(), st.data())
def test_partitions_with_survivors_read_what_is_near(training, data):
    _, source, target = training
    endpoints = TransferEndpoints(source={location: data.draw(st.integers(0, 3))
                                          for location in source.contents},
                                  target={location: data.draw(st.integers(0, 3))
                                          for location in target.contents})
    plan = _plan_and_check(source, target, replica_policy='local_first_least_loaded', endpoints=endpoints)
    for segment, element, holders in _reads(plan, source):
        process = endpoints.target[segment.target_rank]
        near = {location for location in holders if endpoints.source[location] == process}
        assert segment.source_rank in (near or holders), f'element {element} is at {near}'
    assert plan == plan_transfer(target.map,
                                 source.map,
                                 replica_policy='local_first_least_loaded',
                                 endpoints=endpoints)


@settings(max_examples=100)
@given(trainings())
def test_partitions_with_survivors_read_what_a_callable_prefers(training):
    parts, source, target = training
    survivors = {location for part in parts[1:] for location in part.contents}
    asked = []

    def selector(request):
        asked.append(request)
        return next((held.source_rank for held in request.candidates if held.source_rank in survivors),
                    request.candidates[0].source_rank)

    plan = _plan_and_check(source, target, replica_selector=selector)
    for segment, element, holders in _reads(plan, source):
        assert segment.source_rank in (holders & survivors or holders), f'element {element}'
    for request in asked:
        _check_request(request, source, target)


def _reads(plan, source):
    """Every segment with each element that it moves and the locations that hold it."""
    holders = contents_holders(count(source.shape), source.contents)
    for segment in plan.segments:
        read = addresses(segment.shape, segment.source_offset, segment.source_strides)
        for element in source.contents[segment.source_rank][read].tolist():
            yield segment, element, holders[element]


def _check_request(request, source, target):
    """A request tells the truth: region, target addresses, and all its holders in order with theirs."""
    grid = np.arange(count(source.shape)).reshape(source.shape)
    slices = tuple(slice(low, low + size) for low, size in zip(request.logical_origin, request.shape))
    elements = grid[slices].reshape(-1)
    written = addresses(request.shape, request.target_offset, request.target_strides)
    assert np.array_equal(target.contents[request.target_rank][written], elements)
    ranks = [candidate.source_rank for candidate in request.candidates]
    holders = contents_holders(count(source.shape), source.contents)
    assert ranks == sorted(holders[int(elements[0])]) and len(ranks) > 1
    for candidate in request.candidates:
        read = addresses(request.shape, candidate.source_offset, candidate.source_strides)
        assert np.array_equal(source.contents[candidate.source_rank][read], elements)


@settings(max_examples=100)
@given(_pairs(_ANY, affine_strategies.layouts, affine_strategies.simple_layouts))
def test_the_first_holder_is_read_unless_told_otherwise(pair):
    source, target = pair
    plan = _plan_and_check(source, target)
    assert all(segment.source_rank == min(holders) for segment, _, holders in _reads(plan, source))
    assert plan == plan_transfer(target.map, source.map, replica_policy='first_holder')


def test_equal_reads_are_spread_over_replicas():
    """Eight readers of four copies, none of them near: each copy serves two."""
    endpoints = TransferEndpoints(source={rank: rank
                                          for rank in range(4)},
                                  target={rank: 10 + rank
                                          for rank in range(8)})
    plan = plan_transfer(replicated_map((16, ), 8),
                         replicated_map((16, ), 4),
                         replica_policy='local_first_least_loaded',
                         endpoints=endpoints)
    readers = [segment.source_rank for segment in plan.segments]
    assert sorted(readers) == [0, 0, 1, 1, 2, 2, 3, 3]


# ------------------------------------------------------------------------------------------- by hand


def test_rows_into_columns_by_hand():
    plan = plan_transfer(contiguous_split_map((4, 6), [4, 2], 1), contiguous_split_map((4, 6), [1, 3], 0))
    assert plan.segments == (
        TransferSegment(0, 0, (6, 1), 0, 0, (4, 1), (1, 4)),
        TransferSegment(1, 0, (6, 1), 0, 4, (4, 1), (3, 4)),
        TransferSegment(0, 4, (6, 1), 1, 0, (2, 1), (1, 2)),
        TransferSegment(1, 4, (6, 1), 1, 2, (2, 1), (3, 2)),
    )
    assert plan.moved_elements == 24
    assert plan.logical_shape == (4, 6)
    assert plan.statistics.segments == 4


def test_one_layout_into_itself_is_one_copy_per_shard():
    map_ = contiguous_split_map((6, 4), [3, 1], 1)
    plan = plan_transfer(map_, map_)
    assert [(segment.source_rank, segment.target_rank, segment.source_offset, segment.target_offset, segment.numel)
            for segment in plan.segments] == [(0, 0, 0, 0, 18), (1, 1, 0, 0, 6)]


def test_partitions_into_columns_by_hand():
    """3 x 4 over two partitions of six: rank 0 has row 0 and half of row 1, rank 1 the rest.

    The left half takes row 0 and row 1 from rank 0, where rows are four apart, and row 2 from rank 1, whose shard
    starts with the right half of row 1.
    """
    plan = plan_transfer(contiguous_split_map((3, 4), [2, 2], 1), zero3_partition_map((3, 4), 2))
    moved = sorted(
        (segment.target_rank, segment.target_offset, segment.source_rank, segment.source_offset, segment.numel)
        for segment in plan.segments)
    assert moved == [(0, 0, 0, 0, 4), (0, 4, 1, 2, 2), (1, 0, 0, 2, 2), (1, 2, 1, 0, 4)]
    left, right = (next(segment for segment in plan.segments if segment.numel == 4 and segment.target_rank == rank)
                   for rank in (0, 1))
    assert addresses(left.shape, left.source_offset, left.source_strides).tolist() == [0, 1, 4, 5]
    assert addresses(right.shape, right.source_offset, right.source_strides).tolist() == [0, 1, 4, 5]
    assert addresses(right.shape, right.target_offset, right.target_strides).tolist() == [2, 3, 4, 5]


def test_whole_rows_of_a_partition_cut_at_a_column_edge_are_one_strided_segment():
    plan = plan_transfer(contiguous_split_map((8, 6), [2, 4], 1), zero3_partition_map((8, 6), 2))
    assert plan.segments == (
        TransferSegment(0, 0, (6, 1), 0, 0, (2, 1), (4, 2)),
        TransferSegment(1, 0, (6, 1), 0, 8, (2, 1), (4, 2)),
        TransferSegment(0, 2, (6, 1), 1, 0, (4, 1), (4, 4)),
        TransferSegment(1, 2, (6, 1), 1, 16, (4, 1), (4, 4)),
    )


def test_shares_of_fused_parameters_by_hand():
    """Q (4 rows) and K (2 rows) fused: from whole to two ranks, each with its half of both."""
    plan = plan_transfer(sub_param_map((6, 5), [4, 2], [[2, 2], [1, 1]], 0), replicated_map((6, 5), 1))
    assert [(segment.target_rank, segment.target_offset, segment.source_offset, segment.numel)
            for segment in plan.segments] == [(0, 0, 0, 10), (0, 10, 20, 5), (1, 0, 10, 10), (1, 10, 25, 5)]


def test_separate_projections_into_fused_shards_by_hand():
    q, k = _at(zero3_partition_map((4, 3), 2), 0), _at(zero3_partition_map((2, 3), 2), 10)
    plan = plan_transfer(sub_param_map((6, 3), [4, 2], [[2, 2], [1, 1]], 0), concat_affine_maps([q, k], 0))
    assert [(segment.source_rank, segment.source_offset, segment.target_rank, segment.target_offset, segment.numel)
            for segment in plan.segments] == [(0, 0, 0, 0, 6), (10, 0, 0, 6, 3), (1, 0, 1, 0, 6), (11, 0, 1, 6, 3)]


def test_a_transposed_shard_by_hand():
    transposed = ParamAffineMap((2, 3), {0: (3, 2)}, {0: [AffinePiece((2, 3), 0, (3, 1), 0, (1, 2), {0})]})
    plan = plan_transfer(contiguous_split_map((2, 3), [1, 1], 0), transposed)
    assert [(segment.target_rank, addresses(segment.shape, segment.source_offset, segment.source_strides).tolist())
            for segment in plan.segments] == [(0, [0, 2, 4]), (1, [1, 3, 5])]


def test_a_permuted_layout_by_hand():
    """A shard of 2 x 3 seen as the transpose of the 3 x 2 parameter."""
    source = permute(replicated_map((2, 3), 1), (1, 0))
    plan = plan_transfer(replicated_map((3, 2), 1), source)
    segment, = plan.segments
    assert addresses(segment.shape, segment.source_offset, segment.source_strides).tolist() == [0, 3, 1, 4, 2, 5]
    assert addresses(segment.shape, segment.target_offset, segment.target_strides).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_scalar():
    plan = plan_transfer(zero3_partition_map((), 3), replicated_map((), 2))
    segment, = plan.segments
    assert (segment.source_rank, segment.target_rank, segment.numel, segment.shape) == (0, 0, 1, ())
    assert dict(plan.target_numel) == {0: 1, 1: 0, 2: 0}


@pytest.mark.parametrize('shape', [(0, ), (3, 0), (0, 4)])
def test_a_parameter_of_no_elements_needs_no_segments(shape):
    plan = plan_transfer(zero3_partition_map(shape, 3), replicated_map(shape, 2))
    assert plan.segments == ()
    assert plan.moved_elements == 0
    assert dict(plan.target_numel) == {0: 0, 1: 0, 2: 0}


def test_one_layout_whose_replicas_store_a_block_whole_and_in_halves():
    whole = AffinePiece((4, 3), 0, (3, 1), 0, (3, 1), {0, 1})
    halves = [AffinePiece((4, 1), 0, (3, 1), 0, (1, 1), {0, 1}), AffinePiece((4, 2), 1, (3, 1), 4, (2, 1), {0, 1})]
    replicas = ParamAffineMap((4, 3), {0: (4, 3), 1: (12, )}, {0: [whole], 1: halves})
    grid = np.arange(12).reshape(4, 3)
    contents = {0: grid.reshape(-1), 1: np.concatenate([grid[:, :1].reshape(-1), grid[:, 1:].reshape(-1)])}
    partitions = _at(zero3_partition_map((4, 3), 5), 10)
    merged = union_affine_maps([replicas, partitions])
    held = {**contents, **{10 + rank: np.arange(12)[3 * rank:3 * rank + 3] for rank in range(5)}}
    held[14] = held[14][:0]
    for source_map, source_contents in ((replicas, contents), (merged, held)):
        for prefer in sorted(source_contents):
            plan = plan_transfer(contiguous_split_map((4, 3), [1, 2], 1),
                                 source_map,
                                 replica_selector=lambda request: next(
                                     (held.source_rank for held in request.candidates
                                      if held.source_rank == prefer), request.candidates[0].source_rank))
            check_plan(plan, affine_strategies.split_contents((4, 3), [1, 2], 1), source_contents)
            assert len(source_contents[prefer]) == 0 or prefer in {segment.source_rank for segment in plan.segments}


def test_a_huge_parameter_plans_without_being_made():
    """2**40 elements; three partitions that end inside rows, into four column shards."""
    shape = (2**20, 2**20)
    plan = plan_transfer(contiguous_split_map(shape, [2**18] * 4, 1), zero3_partition_map(shape, 3))
    assert plan.moved_elements == 2**40
    assert sum(plan.source_numel.values()) == sum(plan.target_numel.values()) == 2**40
    assert len(plan.segments) <= 4 * 3 * 3
    for segment in plan.segments:
        last = segment.source_offset + sum(
            (size - 1) * stride for size, stride in zip(segment.shape, segment.source_strides))
        assert last < plan.source_numel[segment.source_rank]


def test_segments_follow_the_blocks_and_not_the_elements():
    """512 row shards into 8 column shards meet 4096 times, whatever their size."""
    for width in (8, 64, 8192):
        plan = plan_transfer(contiguous_split_map((16384, width), [width // 8] * 8, 1),
                             contiguous_split_map((16384, width), [32] * 512, 0))
        assert len(plan.segments) == 4096
        assert plan.moved_elements == 16384 * width


# --------------------------------------------------------------------------------------------- scales

_POWERS = st.sampled_from([1.0, 0.5, 2.0, 0.25])
_FACTORS = st.sampled_from([1.0, 1 / 3, 3.0, 0.1, -2.0])


@settings(max_examples=150)
@given(
    _pairs(_ANY, lambda shape: affine_strategies.scaled_layouts(shape, _FACTORS),
           lambda shape: affine_strategies.scaled_layouts(shape, _FACTORS)))
def test_rescaling_is_the_arithmetic_of_rebuild_and_extract(pair):
    source, target = pair
    plan = _plan_and_check(source, target, scale_power=1)
    full = torch.randn(source.shape, generator=torch.Generator().manual_seed(7))
    shards = {location: source.map.extract(full, location).reshape(-1) for location in source.contents}
    found = {location: torch.zeros(len(shard)) for location, shard in target.contents.items()}
    run_plan_on_tensors(plan, shards, found)
    # Replicas under other factors agree only up to rounding, and ``rebuild`` insists on bits; so each element is
    # compared with the arithmetic on the one shard that was read.
    scales = {'source': shard_scales(source.map), 'target': shard_scales(target.map)}
    for segment in plan.segments:
        read = addresses(segment.shape, segment.source_offset, segment.source_strides)
        written = addresses(segment.shape, segment.target_offset, segment.target_strides)
        factor, wanted = (float(scales[side][rank][where[0]])
                          for side, rank, where in (('source', segment.source_rank, read),
                                                    ('target', segment.target_rank, written)))
        held = shards[segment.source_rank][torch.from_numpy(read)]
        got = found[segment.target_rank][torch.from_numpy(written)]
        if factor == wanted:
            assert (segment.source_scale, segment.target_scale) == (1.0, 1.0)
            assert torch.equal(got, held)
        else:
            value = held if factor == 1.0 else held / factor
            assert torch.equal(got, value if wanted == 1.0 else value * wanted)


@settings(max_examples=100)
@given(
    _pairs(_ANY, lambda shape: affine_strategies.scaled_layouts(shape, _POWERS),
           lambda shape: affine_strategies.scaled_layouts(shape, _POWERS)))
def test_rescaling_agrees_with_extract_of_rebuild(pair):
    """With powers of two all replicas agree to the bit, so ``rebuild`` and ``extract`` can be the reference."""
    source, target = pair
    plan = _plan_and_check(source, target, scale_power=1)
    full = torch.randn(source.shape, generator=torch.Generator().manual_seed(7))
    shards = {location: source.map.extract(full, location) for location in source.contents}
    rebuilt = source.map.rebuild(shards)
    found = {location: torch.full((len(shard), ), float('nan')) for location, shard in target.contents.items()}
    run_plan_on_tensors(plan, {location: shard.reshape(-1) for location, shard in shards.items()}, found)
    for location, shard in found.items():
        assert torch.equal(shard, target.map.extract(rebuilt, location).reshape(-1))


@settings(max_examples=60)
@given(_ANY.flatmap(lambda shape: affine_strategies.scaled_layouts(shape, _FACTORS)))
def test_factors_that_cancel_need_no_arithmetic_and_no_permission(layout):
    plan = _plan_and_check(layout, layout)
    assert all((segment.source_scale, segment.target_scale) == (1.0, 1.0) for segment in plan.segments)


@pytest.mark.parametrize('source, target', [(0.5, 1.0), (1.0, 0.5), (0.5, 0.25)])
@pytest.mark.parametrize('power', [None, -1, -2])
def test_factors_that_do_not_cancel_need_scale_power_one(source, target, power):
    with pytest.raises(UnsupportedLayoutError, match='scale'):
        plan_transfer(replicated_map((4, ), 1, target), replicated_map((4, ), 2, source), scale_power=power)


def test_a_scaled_segment_carries_both_factors():
    plan = plan_transfer(replicated_map((4, ), 4, 0.25), replicated_map((4, ), 2, 0.5), scale_power=1)
    assert {(segment.source_scale, segment.target_scale) for segment in plan.segments} == {(0.5, 0.25)}
    assert TransferPlan.from_dict(plan.to_dict()) == plan


def test_a_holder_of_the_targets_own_factor_is_preferred():
    source = union_affine_maps([replicated_map((4, ), 1, 0.5), _at(replicated_map((4, ), 1), 5)])
    assert [segment.source_rank for segment in plan_transfer(replicated_map((4, ), 1), source).segments] == [5]
    assert [segment.source_rank for segment in plan_transfer(replicated_map((4, ), 1, 0.5), source).segments] == [0]
    plan = plan_transfer(replicated_map((4, ), 1), source, scale_power=1)
    assert [segment.source_rank for segment in plan.segments] == [5]


# -------------------------------------------------------------------------------------------- refusals


def _strides(shape):
    return affine_strategies.row_major(shape)


def _whole(shape, location=0, holders=None, **changed):
    """One piece that stores everything, with some of its fields changed."""
    fields = dict(shape=shape,
                  source_offset=0,
                  source_strides=_strides(shape),
                  dest_offset=0,
                  dest_strides=_strides(shape),
                  locations=holders or {location})
    fields.update(changed)
    return AffinePiece(**fields)


def _map(pieces, shards=None, shape=(4, 3)):
    return ParamAffineMap(shape, shards if shards is not None else {0: shape}, pieces)


_TOP, _BOTTOM = (_whole((2, 3), source_offset=offset, dest_offset=offset) for offset in (0, 6))

CONTRADICTIONS = {
    'two pieces at the same addresses': (_map({0: [_TOP, _whole((2, 3), source_offset=6,
                                                                dest_offset=0)]}), 'same shard addresses'),
    'one piece that stores all rows at one address': (_map({0: [_whole(
        (4, 3), dest_strides=(0, 1))]}), 'same shard addresses'),
    'pieces that overlap in part': (_map({0: [_TOP, _whole((2, 3), source_offset=6,
                                                           dest_offset=3)]}), 'same shard addresses'),
    'a location named that holds nothing': (_map({0: [_whole((4, 3), holders={0, 7})]}), 'different locations'),
    'a holder that is not named': (_map({
        0: [_whole((4, 3))],
        1: [_whole((4, 3), location=1)]
    }, {
        0: (4, 3),
        1: (4, 3)
    }), 'different locations'),
    'a holder of only a part': (_map({
        0: [_whole((4, 3), holders={0, 1})],
        1: [_whole((2, 3), holders={0, 1})]
    }, {
        0: (4, 3),
        1: (2, 3)
    }), 'different locations'),
    'a shard that holds an element twice': (_map({0: [_whole((4, 3)), _whole((2, 3), dest_offset=12)]},
                                                 {0: (6, 3)}), None),
    'no holder': (_map({0: [_whole((4, 3), locations=())]}), 'no holder'),
    'nobody holds the bottom': (_map({0: [_TOP]}, {0: (2, 3)}), None),
    'no shard shape': (_map({0: [_whole((4, 3))]}, {}), 'no shard shape'),
    'source strides of another length': (_map({0: [_whole((4, 3), source_strides=(1, ))]}), 'strid'),
    'dest strides of another length': (_map({0: [_whole((4, 3), dest_strides=(12, 3, 1))]}), 'strid'),
    'a piece beyond the parameter': (_map({0: [_TOP, _whole((2, 3), source_offset=9, dest_offset=6)]}), None),
    'a piece before the parameter': (_map({0: [_whole((4, 3), source_offset=-3)]}), None),
    'an offset far outside': (_map({0: [_whole((4, 3), source_offset=12)]}), None),
    'a piece beyond its shard': (_map({0: [_whole((4, 3), dest_offset=1)]}), None),
    'a piece before its shard': (_map({0: [_whole((4, 3), dest_offset=-1)]}), None),
    'a full piece in an empty shard': (_map({0: [_whole((4, 3))]}, {0: (0, 3)}), None),
}


@pytest.mark.parametrize('side', ['source', 'target'])
@pytest.mark.parametrize('name', CONTRADICTIONS)
def test_maps_that_contradict_themselves_are_refused(name, side):
    bad, word = CONTRADICTIONS[name]
    good = replicated_map((4, 3), 2)
    with pytest.raises(InvalidMapError, match=word) as caught:
        plan_transfer(*((bad, good) if side == 'target' else (good, bad)))
    assert side in str(caught.value)


@pytest.mark.parametrize('pieces', [[], [_TOP]])
def test_a_target_shard_that_is_not_filled_is_refused(pieces):
    full = {1: [_whole((4, 3), 1)]} if not pieces else {}
    bad = _map({0: pieces, **full}, {0: (4, 3), **{rank: (4, 3) for rank in full}})
    with pytest.raises(InvalidMapError, match='of its'):
        plan_transfer(bad, replicated_map((4, 3), 1))


def test_an_uncovered_source_is_refused_with_the_first_element_that_is_missing():
    source = contiguous_split_map((4, 3), [1, 2], 0)
    with pytest.raises(InvalidMapError, match='of its.*offset 9'):
        plan_transfer(replicated_map((4, 3), 1), source)


def test_an_uncovered_target_is_refused():
    with pytest.raises(InvalidMapError, match='target.*of its.*offset 9'):
        plan_transfer(contiguous_split_map((4, 3), [1, 2], 0), replicated_map((4, 3), 1))


def test_different_parameters_are_refused():
    with pytest.raises(InvalidMapError, match=r'\(3, 4\).*\(4, 3\)'):
        plan_transfer(replicated_map((4, 3), 1), replicated_map((3, 4), 1))


@pytest.mark.parametrize('side', ['source', 'target'])
@pytest.mark.parametrize('strides', [(3, 2), (4, 1), (3, 3)])
def test_a_piece_that_is_no_block_of_the_parameter_is_refused(strides, side):
    """Truthful perhaps, but no box: every second column, a shear, a diagonal."""
    odd = _map({0: [_whole((2, 2), source_strides=strides)], 1: []}, {0: (2, 2), 1: (0, )})
    good = replicated_map((4, 3), 2)
    with pytest.raises(AffineTransferError) as caught:
        plan_transfer(*((odd, good) if side == 'target' else (good, odd)))
    assert isinstance(caught.value, (InvalidMapError, UnsupportedLayoutError))
    assert side in str(caught.value)


def test_strides_that_interleave_without_dividing_are_unsupported():
    """Even addresses for one piece, 1 and 4 and 7 for the other: disjoint, but no box of digits says so."""
    pieces = [
        AffinePiece((3, ), 0, (1, ), 0, (2, ), {0}),
        AffinePiece((2, ), 3, (1, ), 1, (6, ), {0}),
        AffinePiece((2, ), 5, (1, ), 3, (5, ), {0}),
    ]
    source = narrow(ParamAffineMap((7, ), {0: (9, )}, {0: pieces}), 0, 0, 7)
    with pytest.raises(UnsupportedLayoutError, match='neither divides'):
        plan_transfer(replicated_map((7, ), 1), source)


def test_a_narrowed_target_needs_permission():
    whole = replicated_map((4, 3), 1)
    target = narrow(whole, 0, 1, 2)
    source = replicated_map((2, 3), 1)
    with pytest.raises(InvalidMapError, match='of its'):
        plan_transfer(target, source)
    plan = plan_transfer(target, source, partial_targets=True)
    targets, writes = run_plan(plan, {0: np.arange(6)}, {0: 12})
    assert writes[0].tolist() == [0] * 3 + [1] * 6 + [0] * 3
    assert targets[0].tolist() == [NOTHING] * 3 + list(range(6)) + [NOTHING] * 3
    assert dict(plan.target_numel) == {0: 12}


# -------------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize('answer', [7, -1, True, False, np.int64(0), 0.0, '0', None, (0, )])
def test_a_selector_must_return_a_holder_as_an_int(answer):
    with pytest.raises(InvalidReplicaPolicyError):
        plan_transfer(replicated_map((4, ), 1), replicated_map((4, ), 2), replica_selector=lambda request: answer)


def test_a_selector_is_not_asked_where_there_is_no_choice():

    def never(request):
        raise AssertionError('asked')

    plan = plan_transfer(replicated_map((4, 3), 2), contiguous_split_map((4, 3), [2, 2], 0), replica_selector=never)
    assert len(plan.segments) == 4


def test_what_a_selector_is_asked_by_hand():
    asked = []

    def selector(request):
        asked.append(request)
        return 1

    source = union_affine_maps([zero3_partition_map((2, 4), 1), _at(contiguous_split_map((2, 4), [4], 1), 1)])
    plan = plan_transfer(contiguous_split_map((2, 4), [3, 1], 1), source, replica_selector=selector)
    assert [(request.target_rank, request.logical_origin, request.shape, request.target_offset, request.target_strides)
            for request in asked] == [(0, (0, 0), (2, 3), 0, (3, 1)), (1, (0, 3), (2, 1), 0, (1, 1))]
    assert [[(held.source_rank, held.source_offset, held.source_strides) for held in request.candidates]
            for request in asked] == [[(0, 0, (4, 1)), (1, 0, (4, 1))], [(0, 3, (4, 1)), (1, 3, (4, 1))]]
    assert {segment.source_rank for segment in plan.segments} == {1}


def test_an_error_in_a_selector_is_not_swallowed():

    def broken(request):
        raise KeyError('topology')

    with pytest.raises(KeyError, match='topology'):
        plan_transfer(replicated_map((4, ), 1), replicated_map((4, ), 2), replica_selector=broken)


def test_unknown_policies_and_missing_endpoints_are_refused():
    maps = replicated_map((4, ), 1), replicated_map((4, ), 2)
    with pytest.raises(InvalidReplicaPolicyError, match='nearest'):
        plan_transfer(*maps, replica_policy='nearest')
    with pytest.raises(InvalidReplicaPolicyError, match='endpoints'):
        plan_transfer(*maps, replica_policy='local_first_least_loaded')
    with pytest.raises(AffineTransferError, match='location'):
        plan_transfer(*maps, replica_policy='local_first_least_loaded', endpoints=TransferEndpoints({}, {0: 0}))


# --------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    'field',
    ['max_pair_checks', 'max_segments', 'max_plan_bytes', 'max_pieces_per_map', 'max_ndim', 'max_merge_checks'])
def test_a_budget_of_one_is_exhausted_and_says_so(field):
    with pytest.raises(AffineTransferError, match=field):
        plan_transfer(contiguous_split_map((4, 6), [3, 3], 1),
                      contiguous_split_map((4, 6), [2, 2], 0),
                      limits=PlanBudget(**{field: 1}))


@settings(max_examples=60)
@given(_pairs(_ANY, affine_strategies.layouts, affine_strategies.simple_layouts), st.data())
def test_a_budget_never_shortens_a_plan(pair, data):
    source, target = pair
    plan = plan_transfer(target.map, source.map)
    spent = {'max_segments': plan.statistics.segments, 'max_plan_bytes': plan.statistics.plan_bytes}
    field = data.draw(st.sampled_from(sorted(spent)))
    assert plan_transfer(target.map, source.map, PlanBudget(**{field: spent[field]})) == plan
    if spent[field]:
        with pytest.raises(AffineTransferError, match=field):
            plan_transfer(target.map, source.map, PlanBudget(**{field: spent[field] - 1}))


# ------------------------------------------------------------------------------------ how it is planned


@pytest.mark.parametrize('method', ['holders', 'uncovered_offsets', 'validate_coverage', 'rebuild', 'extract'])
def test_planning_never_walks_elements(monkeypatch, method):

    def forbidden(*arguments, **options):
        raise AssertionError(f'planning called {method}')

    source = union_affine_maps([zero3_partition_map((5, 6), 4), _at(contiguous_split_map((5, 6), [2, 4], 1), 10)])
    monkeypatch.setattr(ParamAffineMap, method, forbidden)
    plan = plan_transfer(contiguous_split_map((5, 6), [3, 2], 0), source)
    assert plan.moved_elements == 30


@settings(max_examples=60)
@given(_pairs(_ANY, affine_strategies.simple_layouts, affine_strategies.simple_layouts), st.data())
def test_the_order_of_locations_and_pieces_does_not_change_the_plan(pair, data):
    source, target = pair
    shuffled = []
    for layout in pair:
        order = data.draw(st.permutations(sorted(layout.contents)))
        shuffled.append(
            ParamAffineMap(layout.shape, {location: layout.map.shard_shapes[location]
                                          for location in order},
                           {
                               location: data.draw(st.permutations(list(layout.map.pieces_by_rank.get(location, ()))))
                               for location in order
                           }))
    assert plan_transfer(shuffled[1], shuffled[0]).segments == plan_transfer(target.map, source.map).segments


# ----------------------------------------------------------------------------------------- stored plans


@settings(max_examples=100)
@given(_pairs(_ANY, affine_strategies.layouts, affine_strategies.simple_layouts))
def test_a_stored_plan_is_read_back_and_proved_again(pair):
    source, target = pair
    plan = plan_transfer(target.map, source.map)
    assert TransferPlan.from_dict(plan.to_dict(), target.map, source.map) == plan


@settings(max_examples=150)
@given(_pairs(_ANY, affine_strategies.layouts, affine_strategies.simple_layouts), st.data())
def test_a_stored_plan_that_was_tampered_with_is_refused(pair, data):
    """Whether a changed plan still does its work is what the oracle says, not what the reader says."""
    source, target = pair
    entry = plan_transfer(target.map, source.map).to_dict()
    if not entry['segments']:
        return
    segment = data.draw(st.sampled_from(entry['segments']))
    change = data.draw(st.sampled_from(['lost', 'twice', 'source', 'target', 'source offset', 'target offset']))
    if change == 'lost':
        entry['segments'].remove(segment)
    elif change == 'twice':
        entry['segments'].append(segment)
    else:
        side, _, offset = change.partition(' ')
        places = source.contents if side == 'source' else target.contents
        if offset:
            segment[side][1] += data.draw(st.sampled_from([-1, 1]))
        else:
            segment[side][0] = data.draw(st.sampled_from(sorted(places)))
    if _still_right(entry, source, target):
        assert TransferPlan.from_dict(entry, target.map, source.map).moved_elements >= 0
    else:
        with pytest.raises(AffineTransferError):
            TransferPlan.from_dict(entry, target.map, source.map)


def _still_right(entry, source, target):
    arrived = {location: np.full(len(shard), NOTHING) for location, shard in target.contents.items()}
    writes = {location: np.zeros(len(shard), np.int64) for location, shard in target.contents.items()}
    for segment in entry['segments']:
        (source_rank, *read), (target_rank, *written) = segment['source'], segment['target']
        read, written = addresses(segment['shape'], *read), addresses(segment['shape'], *written)
        held, filled = source.contents[source_rank], arrived[target_rank]
        if min(read.min(), written.min()) < 0 or read.max() >= len(held) or written.max() >= len(filled):
            return False
        filled[written] = held[read]
        np.add.at(writes[target_rank], written, 1)
    return all(
        np.array_equal(arrived[location], shard) and (writes[location] == 1).all()
        for location, shard in target.contents.items())


def test_gathered_blocks_and_flat_bounds_meet_by_hand():
    source = block_gather_map((6, ), {0: [2, 0], 1: [1]}, 2, 0)
    plan = plan_transfer(flat_partition_map((6, ), [(0, 1), (1, 6)]), source)
    assert plan.segments == (
        TransferSegment(0, 2, (1, ), 0, 0, (1, ), (1, )),
        TransferSegment(0, 3, (1, ), 1, 0, (1, ), (1, )),
        TransferSegment(1, 0, (1, ), 1, 1, (1, ), (2, )),
        TransferSegment(0, 0, (1, ), 1, 3, (1, ), (2, )),
    )


def test_columns_gathered_out_of_order_still_plan_after_a_union():
    """Columns 0 and 1 are stored two apart: seen as one block they would step through columns that others fill."""
    gathered = union_affine_maps([block_gather_map((2, 3), {0: [0, 2, 1]}, 1, 1)])
    plan = plan_transfer(gathered, replicated_map((2, 3), 1))
    check_plan(plan, {0: np.array([0, 2, 1, 3, 5, 4])}, {0: np.arange(6)})


def test_blocks_of_one_row_join_the_blocks_of_many():
    """Rows 2 and 3 are read one by one, after rows 0 and 1 together: all four are one copy in the end."""
    pieces = [
        AffinePiece((rows, 3, 6), 18 * first, (18, 6, 1), 18 * first, (18, 6, 1), {0})
        for first, rows in ((0, 2), (2, 1), (3, 1))
    ]
    source = ParamAffineMap((4, 3, 6), {0: (4, 3, 6)}, {0: pieces})
    plan = plan_transfer(replicated_map((4, 3, 6), 1), source)
    assert plan.segments == (TransferSegment(0, 0, (18, 6, 1), 0, 0, (18, 6, 1), (4, 3, 6)), )


# ------------------------------------------------------------------------- what once went wrong, or cost too much


def test_a_row_held_twice_is_not_taken_for_its_neighbour():
    """On an axis of extent 1 the parameter does not step, so a twin starts where a next index would."""
    piece = partial(AffinePiece, (1, 1, 4), 0, (4, 4, 1))
    twice = ParamAffineMap((2, 1, 4), {0: (8, )}, {0: [piece(0, (4, 4, 1), [0]), piece(4, (4, 4, 1), [0])]})
    assert [tuple(part.shape) for part in permute(twice, (0, 1, 2)).pieces_by_rank[0]] == [(1, 1, 4), (1, 1, 4)]
    with pytest.raises(InvalidMapError, match='a shard holds an element once'):
        plan_transfer(replicated_map((2, 1, 4), 1), permute(twice, (0, 1, 2)))


def test_plans_whose_strides_divide_only_when_rows_are_joined_prove_again():
    strides = (15, 5, 1)
    target = ParamAffineMap((4, 3, 5), {
        0: (48, ),
        1: (4, 1, 3)
    }, {
        0: [
            AffinePiece((4, 2, 3), 0, strides, 0, (12, 3, 1), [0]),
            AffinePiece((4, 3, 2), 3, strides, 6, (12, 2, 1), [0])
        ],
        1: [AffinePiece((4, 1, 3), 10, strides, 0, (3, 3, 1), [1])]
    })
    source = zero3_partition_map((4, 3, 5), 1)
    plan = plan_transfer(target, source)
    stored = plan.to_dict()
    assert TransferPlan.from_dict(stored, target, source) == plan
    stored['segments'][0]['source'][1] += 1
    with pytest.raises(InvalidMapError):
        TransferPlan.from_dict(stored, target, source)


def test_a_plan_that_repeats_one_segment_is_refused_without_comparing_all_pairs():
    count = 30000
    whole = replicated_map((count, ), 1)
    stored = plan_transfer(whole, whole).to_dict()
    stored['segments'] = [{'shape': [1], 'source': [0, 0, [1]], 'target': [0, 0, [1]]}] * count
    with pytest.raises(AffineTransferError, match='max_pair_checks'):
        TransferPlan.from_dict(stored, whole, whole)


def test_many_lying_replicas_are_refused_without_comparing_all_pairs():
    ranks = range(8000)
    whole = AffinePiece((4, 4), 0, (4, 1), 0, (4, 1), [0])
    liars = ParamAffineMap((4, 4), {rank: (4, 4)
                                    for rank in ranks},
                           {rank: [AffinePiece(whole.shape, 0, (4, 1), 0, (4, 1), [rank])]
                            for rank in ranks})
    with pytest.raises(InvalidMapError, match='different locations'):
        plan_transfer(liars, liars)


def test_layouts_that_cut_each_other_into_dust_are_refused():
    size = 5000
    rows = contiguous_split_map((size, size), [1] * size, 0)
    columns = relabel(contiguous_split_map((size, size), [1] * size, 1), {rank: size + rank for rank in range(size)})
    with pytest.raises(ValueError, match='cut each other into 25000000 parts'):
        union_affine_maps([rows, columns])


def test_a_truthful_run_over_several_rows_is_unsupported_and_not_invalid():
    run = ParamAffineMap((2, 2), {0: (4, )}, {0: [AffinePiece((4, ), 0, (1, ), 0, (1, ), [0])]})
    with pytest.raises(UnsupportedLayoutError, match='flat_partition_map'):
        plan_transfer(replicated_map((2, 2), 1), run)


@pytest.mark.parametrize('arguments', [(None, replicated_map((4, ), 1)), (replicated_map((4, ), 1), {}),
                                       (replicated_map((4, ), 1), replicated_map((4, ), 1), 5)])
def test_arguments_of_the_wrong_type_are_named(arguments):
    with pytest.raises(TypeError, match='target_map|source_map|limits'):
        plan_transfer(*arguments)
