# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Plans run in one process: addressing, casts, scales, shared memory, refusals."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from affine_plans import (DTYPES, element_plan, matrix_plan, matrix_source, matrix_target, plan_of, same_bits, values)
from deepspeed.checkpoint.affine_transfer import PlanStatistics, TransferEndpoints, TransferPlan, TransferSegment
from deepspeed.checkpoint.affine_transfer_executor import (AffineTransferExecutionError, StagingBudget, apply_plan,
                                                           plan_digest)
from deepspeed.checkpoint.affine_transfer_executor.buffers import Piece, Shard
from deepspeed.checkpoint.affine_transfer_executor.overlap import Region, clashes, first_clash


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(dtype):
    full = values(7 * 5, dtype).view(7, 5)
    sources = {part: matrix_source(full, 3, part) for part in range(3)}
    targets = {part: torch.zeros_like(matrix_target(full, 2, part)) for part in range(2)}
    stats = apply_plan(matrix_plan(7, 5, 3, 2), sources, targets)
    assert all(same_bits(targets[part], matrix_target(full, 2, part)) for part in range(2))
    assert stats.local_copy_bytes == 35 * dtype.itemsize and stats.sent_bytes == stats.rounds == 0


@pytest.mark.parametrize('first', [0, 2, 4, 8])
@pytest.mark.parametrize('columns', [8, 12])
def test_rows_are_copied_whatever_byte_they_start_at(first, columns):
    """Rows of whole 8 bytes are copied as such where memory allows; a file's header may end anywhere."""
    full = values(8 * columns, torch.bfloat16).view(8, columns)
    memory = bytearray(first + full.nbytes)
    source = torch.frombuffer(memory, dtype=torch.bfloat16, offset=first, count=full.numel())
    source.copy_(full.flatten())
    targets = {part: torch.zeros_like(matrix_target(full, 2, part)) for part in range(2)}
    apply_plan(matrix_plan(8, columns, 1, 2), {0: source}, targets)
    assert all(same_bits(targets[part], matrix_target(full, 2, part)) for part in range(2))


def test_example_of_a_row_split_becoming_a_column_split():
    targets = {0: torch.zeros(2, 2), 1: torch.zeros(2, 2)}
    apply_plan(matrix_plan(2, 4, 2, 2), {0: torch.tensor([1., 2, 3, 4]), 1: torch.tensor([5., 6, 7, 8])}, targets)
    assert targets[0].tolist() == [[1, 2], [5, 6]] and targets[1].tolist() == [[3, 4], [7, 8]]


def strided(draw, numel_shape):
    """A tensor of this shape, of any strides and storage offset a view can have."""
    order = draw(st.permutations(range(len(numel_shape))))
    parent = [
        size * draw(st.integers(1, 2)) + draw(st.integers(0, 2)) for size in (numel_shape[axis] for axis in order)
    ]
    base = torch.full((draw(st.integers(0, 3)) + torch.Size(parent).numel(), ), -1, dtype=torch.int64)
    view = base[len(base) - torch.Size(parent).numel():].view(parent)
    for place, axis in enumerate(order):
        step = parent[place] // numel_shape[axis]
        start = draw(st.integers(0, parent[place] - (numel_shape[axis] - 1) * step - 1))
        view = view.narrow(place, start, (numel_shape[axis] - 1) * step + 1)
        view = view[(slice(None), ) * place + (slice(None, None, step), )]
    return base, view.permute([order.index(axis) for axis in range(len(order))])


@st.composite
def shards_and_pieces(draw):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    base, view = strided(draw, shape)
    numel = view.numel()
    strides, sizes, last = [], [], 0
    for _ in range(draw(st.integers(0, 3))):
        stride = draw(st.integers(1, max(numel, 1)))
        size = draw(st.integers(1, max(1, min(6, (numel - 1 - last) // stride + 1))))
        if last + (size - 1) * stride >= numel:
            size = 1
        last += (size - 1) * stride
        strides.append(stride)
        sizes.append(size)
    return base, view, Piece(draw(st.integers(0, numel - 1 - last)), tuple(strides), tuple(sizes))


def addresses(piece):
    """The piece's addresses in row-major order, one by one."""
    for index in itertools.product(*(range(size) for size in piece.shape)):
        yield piece.offset + sum(place * stride for place, stride in zip(index, piece.strides))


@settings(max_examples=400, deadline=None)
@given(shards_and_pieces())
def test_pieces_address_the_row_major_order_of_any_view(case):
    base, view, piece = case
    view.copy_(torch.arange(view.numel()).view(view.shape))
    out = torch.empty(piece.numel, dtype=torch.int64)
    Shard(view).read(piece, out, lambda block: block)
    assert out.tolist() == list(addresses(piece))


@settings(max_examples=400, deadline=None)
@given(shards_and_pieces())
def test_writing_changes_what_a_piece_addresses_and_nothing_else(case):
    base, view, piece = case
    wanted = list(addresses(piece))
    if len(set(wanted)) < len(wanted):
        return
    Shard(view).write(piece, torch.arange(100, 100 + piece.numel))
    expected = [-1] * view.numel()
    for position, address in enumerate(wanted):
        expected[address] = 100 + position
    assert view.reshape(-1).tolist() == expected
    assert int((base != -1).sum()) == piece.numel


@pytest.mark.parametrize('source_scale, target_scale', [(3.0, 1.0), (1.0, 0.1), (3.0, 7.0), (0.3, 0.3)])
@pytest.mark.parametrize('dtype, target_dtype', [(torch.float32, torch.float32), (torch.float32, torch.bfloat16),
                                                 (torch.bfloat16, torch.float32), (torch.float64, torch.float16)])
def test_scales_are_applied_as_rebuild_and_extract_do(dtype, target_dtype, source_scale, target_scale):
    full = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    targets = {part: torch.zeros(6, 2, dtype=target_dtype) for part in range(2)}
    plan = matrix_plan(6, 4, 2, 2, (source_scale, target_scale))
    apply_plan(plan, {part: matrix_source(full, 2, part) for part in range(2)}, targets, target_dtype=target_dtype)
    expected = full if source_scale == 1.0 else full / source_scale
    if target_scale != 1.0:
        expected = expected.clone().mul_(target_scale)
    for part in range(2):
        assert same_bits(targets[part], matrix_target(expected.to(target_dtype), 2, part))


def test_parameters_and_inference_tensors_can_be_written():
    plan = element_plan(4, {0: [0, 1, 2, 3]}, {0: [3, 2], 1: [1, 0]})
    with torch.inference_mode():
        frozen = torch.zeros(2)
    weight = torch.nn.Parameter(torch.zeros(2))
    apply_plan(plan, {0: torch.nn.Parameter(torch.arange(4.))}, {0: frozen, 1: weight})
    assert frozen.tolist() == [3, 2] and weight.tolist() == [1, 0] and weight.requires_grad


def test_a_lazily_conjugated_source_is_read_as_it_looks():
    plan = element_plan(2, {0: [0, 1]}, {0: [1, 0]})
    source = torch.tensor([1 + 2j, 3 - 1j])
    target = torch.zeros(2, dtype=torch.complex64)
    apply_plan(plan, {0: source.conj()}, {0: target})
    assert torch.equal(target, torch.tensor([3 + 1j, 1 - 2j]))
    with pytest.raises(AffineTransferExecutionError, match='conjugated'):
        apply_plan(plan, {0: source}, {0: target.conj()})


def test_a_scalar_and_empty_parameters_move():
    scalar = torch.zeros(())
    apply_plan(plan_of([TransferSegment(0, 0, (), 0, 0, (), ())], (), {0: 1}, {0: 1}), {0: torch.tensor(3.)},
               {0: scalar})
    assert scalar.item() == 3
    stats = apply_plan(plan_of([], (0, 4), {0: 0}, {0: 0}), {0: torch.zeros(0, 4)}, {0: torch.zeros(0)})
    assert stats.segments == 0


def test_plans_without_buffer_sizes_need_large_enough_buffers():
    segment = TransferSegment(0, 2, (1, ), 0, 0, (1, ), (2, ))
    plan = TransferPlan((segment, ), (2, ), 2, PlanStatistics(1, 1, 1, 1, 1, 1))
    target = torch.zeros(2)
    apply_plan(plan, {0: torch.arange(5.)}, {0: target})
    assert target.tolist() == [2, 3]
    with pytest.raises(AffineTransferExecutionError,
                       match='source location 0 has a buffer of 3 elements.* at least 4'):
        apply_plan(plan, {0: torch.arange(3.)}, {0: target})


def test_a_region_that_stays_where_it_is_is_free():
    plan = element_plan(6, {0: [0, 1, 2, 3], 1: [4, 5]}, {0: [0, 1, 4, 5]})
    shard = torch.tensor([0., 1, 8, 9])
    stats = apply_plan(plan, {0: shard, 1: torch.tensor([4., 5])}, {0: shard})
    assert shard.tolist() == [0, 1, 4, 5]
    assert (stats.in_place_bytes, stats.local_copy_bytes) == (8, 8)


def test_reading_where_another_segment_writes_is_refused():
    shard = torch.arange(4.)
    with pytest.raises(AffineTransferExecutionError, match='overlap in memory.*clone'):
        apply_plan(element_plan(4, {0: [0, 1, 2, 3]}, {0: [1, 0, 3, 2]}), {0: shard}, {0: shard})
    assert shard.tolist() == [0, 1, 2, 3]
    with pytest.raises(AffineTransferExecutionError, match='source location 0.*target location 0.*overlap'):
        apply_plan(matrix_plan(2, 2, 1, 1, (2.0, 2.0)), {0: shard}, {0: shard})
    assert shard.tolist() == [0, 1, 2, 3]


def test_views_of_one_allocation_may_be_source_and_target():
    whole = torch.arange(24.).view(4, 6)
    apply_plan(element_plan(8, {0: range(8)}, {0: range(8)}), {0: whole[:, 0:2]}, {0: whole[:, 4:6]})
    assert torch.equal(whole[:, 4:6], whole[:, 0:2])
    with pytest.raises(AffineTransferExecutionError, match='overlap in memory'):
        apply_plan(element_plan(8, {0: range(8)}, {0: range(8)}), {0: whole[:, 1:3]}, {0: whole[:, 2:4]})


def test_targets_that_share_memory_are_refused():
    plan = element_plan(4, {0: [0, 1, 2, 3]}, {0: [0, 1], 1: [2, 3]})
    shard = torch.zeros(3)
    with pytest.raises(AffineTransferExecutionError, match='target location 0.*target location 1.*overlap'):
        apply_plan(plan, {0: torch.arange(4.)}, {0: shard[:2], 1: shard[1:]})
    with pytest.raises(AffineTransferExecutionError, match='target location 0 share memory with one another'):
        apply_plan(plan, {0: torch.arange(4.)}, {0: torch.zeros(1).expand(2), 1: shard[1:]})
    assert shard.tolist() == [0, 0, 0]


def test_an_expanded_source_may_share_memory_only_with_other_elements():
    plan, base = element_plan(4, {0: [0, 1, 2, 3]}, {0: [0, 1, 2, 3]}), torch.arange(8.)
    with pytest.raises(AffineTransferExecutionError, match='source location 0.*target location 0.*overlap'):
        apply_plan(plan, {0: base[1:2].expand(4)}, {0: base[0:4]})
    assert base.tolist() == list(range(8))
    apply_plan(plan, {0: base[1:2].expand(4)}, {0: base[::2]})
    assert base.tolist() == [1, 1, 1, 3, 1, 5, 1, 7]


def test_every_clash_among_many_interleaved_regions_is_found():
    whole = torch.zeros(16, 64)
    columns = [Region.of(whole[:, index]) for index in range(64)]
    assert first_clash(columns) is None
    assert list(clashes(columns[::2], columns[1::2])) == []
    # A region that only stays where it is meets itself, and no other.
    assert list(clashes(columns, columns[10:12])) == [(10, 0), (11, 1)]
    wide = [*columns[:32], Region.of(whole[:, 5:7]), *columns[32:]]
    assert first_clash(wide) in [(5, 32), (6, 32)]
    assert set(clashes(wide, columns[:7])) == {*((index, index) for index in range(7)), (32, 5), (32, 6)}
    # Strides of 256 and 96 bytes do not divide one another, so these are proved apart in pairs, or not at all.
    odd = [Region.of(whole.view(-1).as_strided((3, ), (24, ), 1024 - 64 + start)) for start in (1, 2)]
    assert first_clash([*columns[:8], odd[0]]) in [(index, 8) for index in range(8)]
    assert first_clash(odd) is None


def byte_set(view):
    width = view.element_size()
    offsets = itertools.product(*(range(size) for size in view.shape))
    starts = [sum(place * stride for place, stride in zip(index, view.stride())) for index in offsets]
    return {view.data_ptr() + start * width + byte for start in starts for byte in range(width)}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_disjointness_is_never_claimed_of_regions_that_meet(data):
    base = torch.zeros(48, dtype=torch.int16)
    views = []
    for _ in range(2):
        sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        strides = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=len(sizes),
                                     max_size=len(sizes)))
        span = sum((size - 1) * stride for size, stride in zip(sizes, strides))
        if span >= 48:
            return
        views.append(base.as_strided(sizes, strides, data.draw(st.integers(0, 47 - span))))
    one, other = map(Region.of, views)
    if byte_set(views[0]) & byte_set(views[1]):
        assert list(clashes([one], [other])) == [(0, 0)]
        assert one.meets_itself() or other.meets_itself() or first_clash([one, other]) == (0, 1)


def refusal(plan, sources, targets, match, **options):
    before = {location: tensor.clone() for location, tensor in targets.items()}
    with pytest.raises(AffineTransferExecutionError, match=match):
        apply_plan(plan, sources, targets, name='w', **options)
    assert all(torch.equal(targets[location], before[location]) for location in targets)


def test_bad_input_is_refused_and_named():
    plan = matrix_plan(4, 4, 2, 2)
    sources = {0: torch.ones(8), 1: torch.ones(8)}
    targets = {0: torch.zeros(8), 1: torch.zeros(8)}
    refusal(plan, {**sources, 1: torch.ones(7)}, targets, "'w': source location 1 .*7 elements.*exactly 8")
    refusal(plan, {**sources, 1: torch.ones(9)}, targets, "source location 1 .*9 elements.*exactly 8")
    refusal(plan, {0: sources[0]}, targets, 'source location 1 belongs to process 0 and has no buffer')
    refusal(plan, sources, {0: targets[0]}, 'target location 1 belongs to process 0 and has no buffer')
    refusal(plan, {**sources, 5: torch.ones(8)}, targets, 'source location 5 .*the plan knows')
    refusal(plan, {
        **sources, 1: torch.ones(8).double()
    }, targets, 'source location 1 .*float64; expected torch.float32')
    refusal(plan, sources, {
        **targets, 1: torch.zeros(8).half()
    }, 'target location 1 .*float16; expected torch.float32')
    refusal(plan, sources, targets, 'only floating point is cast', target_dtype=torch.int32)
    refusal(plan, {**sources, 1: torch.ones(8).to_sparse()}, targets, 'source location 1: .*expected a strided tensor')
    refusal(plan, {**sources, 1: [1.0] * 8}, targets, 'source location 1: .*list; expected a tensor')
    refusal(plan_of([], (4, 4), {0: 16}, {0: 16}), {0: torch.ones(16)}, {0: torch.zeros(16)}, 'moves nothing')


def test_integers_are_neither_cast_nor_scaled():
    plan = matrix_plan(2, 2, 1, 1, (2.0, 1.0))
    refusal(plan, {0: torch.ones(4, dtype=torch.int32)}, {0: torch.zeros(4, dtype=torch.int32)}, 'cannot be scaled')
    plain = matrix_plan(2, 2, 1, 1)
    refusal(plain, {0: torch.ones(4, dtype=torch.int64)}, {0: torch.zeros(4)},
            'only floating point',
            target_dtype=torch.float32)
    refusal(plain, {0: torch.ones(4, dtype=torch.bool)}, {0: torch.zeros(4, dtype=torch.uint8)},
            'only floating point',
            target_dtype=torch.uint8)
    refusal(plain, {0: torch.ones(4, dtype=torch.complex64)}, {0: torch.zeros(4)},
            'only floating point',
            target_dtype=torch.float32)


@pytest.mark.parametrize('segment, match', [
    (TransferSegment(0, -1, (1, ), 0, 0, (1, ), (2, )), 'negative offset'),
    (TransferSegment(0, 1, (-1, ), 0, 0, (1, ), (2, )), 'negative offset, stride'),
    (TransferSegment(0, 0, (2**62, ), 0, 0, (1, ), (4, )), 'int64|elements'),
    (TransferSegment(0, 3, (1, ), 0, 0, (1, ), (2, )), 'element 4 of source location 0, which has 4'),
    (TransferSegment(7, 0, (1, ), 0, 0, (1, ), (2, )), 'source location 7'),
])
def test_segments_that_address_what_is_not_there_are_refused(segment, match):
    refusal(plan_of([segment], (4, ), {0: 4}, {0: 4}), {0: torch.ones(4)}, {0: torch.zeros(4)}, match)


def test_the_digest_tells_what_matters():
    plan, other = matrix_plan(4, 4, 2, 2), matrix_plan(4, 4, 2, 1)
    ends = TransferEndpoints({0: 0, 1: 1}, {0: 0, 1: 1})
    swapped = TransferEndpoints({0: 0, 1: 1}, {0: 1, 1: 0})
    budget = StagingBudget()
    digest = plan_digest(plan, ends, budget, 4)
    assert digest == plan_digest(TransferPlan.from_dict(plan.to_dict()), ends, StagingBudget(), 4)
    others = [
        plan_digest(other, ends, budget, 4),
        plan_digest(plan, swapped, budget, 4),
        plan_digest(plan, ends, StagingBudget(bytes_per_peer=64), 4),
        plan_digest(plan, ends, budget, 2),
        plan_digest(matrix_plan(4, 4, 2, 2, (2.0, 1.0)), ends, budget, 4)
    ]
    assert len({digest, *others}) == 6


@pytest.mark.parametrize('bad', [0, -1, 1.5, True, None])
def test_a_budget_is_a_positive_number_of_bytes(bad):
    with pytest.raises(AffineTransferExecutionError, match='bytes_per_peer'):
        StagingBudget(bytes_per_peer=bad)
