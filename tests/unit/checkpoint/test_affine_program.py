# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Transfers that are compiled once and run often, in one process and over real groups of them."""

import gc
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from affine_fault_points import altered_receive, counted_operations
from affine_plans import element_plan, matrix_plan, matrix_source, matrix_target, same_bits, values
from affine_pool import PATIENCE, Pool, standing_group
from affine_processes import run_processes
from affine_transfer_cases import (DENSE, GAPS, OFFSET, TURNED, copied, differing, everything)
from deepspeed.checkpoint.affine_transfer import TransferEndpoints
from deepspeed.checkpoint.affine_transfer_executor import (AffineTransferExecutionError, StagingBudget,
                                                           TransferBrokenError, TransferRequest, compile_transfer,
                                                           compile_transfers, join_transfer_group, progress_bar)
from deepspeed.checkpoint.affine_transfer_executor.channel import Pending

ALONE = TransferEndpoints({0: 0, 1: 0}, {0: 0, 1: 0})
# Sources on processes 0 and 1, targets on 2 and 3.
APART = TransferEndpoints({0: 0, 1: 1}, {0: 2, 1: 3})
# Process 1 has a source and a target, process 3 nothing at all.
CROSSED = TransferEndpoints({0: 0, 1: 1}, {0: 1, 1: 2})
SMALL = StagingBudget(bytes_per_peer=512, direct_bytes=200)


@pytest.fixture(scope='module')
def pool():
    with Pool(4) as workers:
        yield workers


def refusal(call):
    """The words of a refusal that leaves the program usable."""
    with pytest.raises(AffineTransferExecutionError) as found:
        call()
    assert not isinstance(found.value, TransferBrokenError), found.value
    return str(found.value)


# In one process


@pytest.mark.parametrize('lie', [DENSE, OFFSET, GAPS, TURNED])
@pytest.mark.parametrize('options', [{}, dict(staged=True), dict(verify=True), dict(staged=True, verify=True)])
def test_a_program_reads_its_sources_anew_in_every_run(lie, options):
    case = everything(ALONE)
    sources, targets = case.sources(0, 0, lie), case.targets(0, lie)
    program = case.compile(0, sources, targets, **options)
    assert case.wrong(targets, 0, 0)
    for seed in range(4):
        case.refill(sources, 0, seed)
        stats = program.run()
        assert case.wrong(targets, 0, seed) == []
        assert (stats.sent_bytes, stats.received_bytes, stats.rounds, stats.chunks) == (0, 0, 0, 0)


@pytest.mark.parametrize('lie', [DENSE, OFFSET, GAPS, TURNED])
def test_a_program_is_given_other_tensors_of_any_strides(lie):
    case = everything(ALONE)
    first, second = case.targets(0), case.targets(0, lie)
    program = case.compile(0, case.sources(0, 0), first)
    program.run()
    program.rebind(case.sources(0, 1, lie), second)
    program.run()
    assert case.wrong(first, 0, 0) == [] and case.wrong(second, 0, 1) == []
    # One side keeps its buffers where only the other is given.
    program.rebind(source_buffers=case.sources(0, 2))
    program.run()
    assert case.wrong(second, 0, 2) == []
    program.rebind(target_buffers=first)
    program.run()
    assert case.wrong(first, 0, 2) == []


def with_buffer(buffers, name, location, tensor):
    """Buffers of which one is another; None takes it away."""
    changed = {key: dict(held) for key, held in buffers.items()}
    changed.setdefault(name, {})[location] = tensor
    if tensor is None:
        del changed[name][location]
    return changed


@pytest.mark.parametrize('side, name, location, tensor, words', [
    ('source', 'embed', 0, torch.zeros(29), "'embed': source location 0 has a buffer of 29 elements; .* exactly 30"),
    ('source', 'embed', 0, torch.zeros(31), 'has a buffer of 31 elements'),
    ('source', 'embed', 1, torch.zeros(30).double(), 'has a buffer of torch.float64; expected torch.float32'),
    ('source', 'embed', 1, None, "source location 1 belongs to process 0 and has no buffer"),
    ('source', 'embed', 7, torch.zeros(1), 'source location 7 has a buffer on process 0'),
    ('source', 'embed', 0, 'a string', 'buffer is a str'),
    ('source', 'embed', 0, torch.zeros(30, device='meta'), 'expected a strided tensor in memory'),
    ('source', 'nobody', 0, torch.zeros(30), "source buffers are given for .'nobody'., which the plan does not have"),
    ('source', 'head', 0, torch.zeros(30), "source buffers are given for .'head'."),
    ('target', 'cast', 1, torch.zeros(35), 'has a buffer of torch.float32; expected torch.bfloat16'),
    ('target', 'norm', 1, torch.zeros(1).expand(3), "'norm'"),
])
def test_buffers_that_do_not_fit_are_refused_and_the_program_keeps_its_own(side, name, location, tensor, words):
    case = everything(ALONE)
    sources, targets = case.sources(0, 0), case.targets(0)
    program = case.compile(0, sources, targets)
    given = {'source': sources, 'target': targets}
    with pytest.raises(AffineTransferExecutionError, match=words):
        program.rebind(**{f'{side}_buffers': with_buffer(given[side], name, location, tensor)})
    case.refill(sources, 0, 3)
    program.run()
    assert case.wrong(targets, 0, 3) == []


def test_targets_that_meet_sources_or_each_other_are_refused():
    case = everything(ALONE)
    sources, targets = case.sources(0, 0), case.targets(0)
    program = case.compile(0, sources, targets)
    for buffers in (with_buffer(targets, 'norm', 0, sources['norm'][0].new_zeros(1).expand(3)),
                    with_buffer(targets, 'norm', 0,
                                targets['norm'][1]), with_buffer(targets, 'norm', 1, sources['embed'][0][1:4])):
        refusal(lambda buffers=buffers: program.rebind(target_buffers=buffers))
    program.run()
    assert case.wrong(targets, 0, 0) == []


@pytest.mark.parametrize('buffers, words', [
    ([{}, {}], 'given for 2 parameters; expected one mapping for each of 1'),
    ([], 'given for 0 parameters'),
    ([None], 'source buffers are a NoneType'),
    ([{
        'x': torch.zeros(4)
    }], "name the location 'x'"),
])
def test_programs_of_requests_are_given_a_mapping_for_each(buffers, words):
    target = torch.zeros(4)
    program = compile_transfers([TransferRequest(matrix_plan(2, 2, 1, 1), {0: torch.arange(4.)}, {0: target})], ALONE,
                                torch.float32)
    with pytest.raises(AffineTransferExecutionError, match=words):
        program.rebind(buffers)
    program.rebind([{0: torch.arange(4.) + 1}])
    program.run()
    assert target.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize('lazily', [torch.conj, torch._neg_view, lambda base: torch._neg_view(base.conj())])
def test_lazily_conjugated_and_negated_sources_are_read_anew(lazily):
    base, target = values(12, torch.complex64), torch.zeros(12, dtype=torch.complex64)
    base = torch.randn(12, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    plan = element_plan(12, {0: range(12)}, {0: [11, 3, 4, 5, 0, 1, 2, 10, 9, 8, 7, 6]})
    program = compile_transfer(plan, {0: lazily(base)}, {0: target}, ALONE, torch.complex64)
    for step in range(3):
        base += step
        program.run()
        wanted = lazily(base).resolve_conj().resolve_neg()[[11, 3, 4, 5, 0, 1, 2, 10, 9, 8, 7, 6]]
        assert torch.equal(target, wanted)


def test_a_target_is_no_lazy_view():
    plan = element_plan(2, {0: range(2)}, {0: range(2)})
    words = refusal(lambda: compile_transfer(plan, {0: torch.zeros(
        2, dtype=torch.complex64)}, {0: torch.zeros(2, dtype=torch.complex64).conj()}, ALONE, torch.complex64))
    assert 'target location 0 is a lazily conjugated or negated view' in words


def free(tensor):
    tensor.untyped_storage().resize_(0)


def grow(tensor):
    tensor.untyped_storage().resize_(2 * tensor.untyped_storage().nbytes())


def replace_data(tensor):
    tensor.data = torch.zeros_like(tensor)


def reshape_data(tensor):
    tensor.data = tensor.data[:-1]


def restride_data(tensor):
    tensor.data = torch.zeros(2 * tensor.numel())[::2]


DAMAGES = (free, grow, replace_data, reshape_data, restride_data)


@pytest.mark.parametrize('damage', DAMAGES)
@pytest.mark.parametrize('side', ['source', 'target'])
def test_a_buffer_that_changed_its_memory_is_refused_until_it_is_given_anew(damage, side):
    case = everything(ALONE)
    sources, targets = case.sources(0, 0), case.targets(0)
    program = case.compile(0, sources, targets)
    damage((sources if side == 'source' else targets)['norm'][1])
    before = copied(with_buffer(targets, 'norm', 1, None))
    words = refusal(program.run)
    assert re.search(rf"parameter 'norm': {side} location 1 had \d elements at 0x", words) and 'rebind' in words
    assert differing(targets, before) == []
    sources, targets = case.sources(0, 1), case.targets(0)
    program.rebind(sources, targets)
    program.run()
    assert case.wrong(targets, 0, 1) == []


# dtypes


def one_dtype(source, target=None, **options):
    """Move four numbers; returns them."""
    held = torch.tensor([0, 1, 1, 2]).to(source)
    arrived = torch.zeros(4, dtype=target or source)
    compile_transfer(matrix_plan(2, 2, 1, 1), {
        0: held
    }, {
        0: arrived
    }, ALONE, source, target_dtype=target, **options).run()
    return arrived


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize('target', FLOATS)
@pytest.mark.parametrize('source', FLOATS)
def test_floating_point_is_cast(source, target):
    held = (torch.arange(64.) / 7 - 4).to(source)
    arrived = torch.zeros(64, dtype=target)
    compile_transfer(matrix_plan(8, 8, 1, 1), {0: held}, {0: arrived}, ALONE, source, target_dtype=target).run()
    assert same_bits(arrived, held.to(target))


@pytest.mark.parametrize('source, target', [
    (torch.int32, torch.float32),
    (torch.float32, torch.int32),
    (torch.int8, torch.int16),
    (torch.int32, torch.uint32),
    (torch.bool, torch.uint8),
    (torch.uint8, torch.bool),
    (torch.complex64, torch.float32),
    (torch.float32, torch.complex64),
])
def test_nothing_else_is_cast(source, target):
    words = refusal(lambda: one_dtype(source, target))
    assert f'sources of {source} cannot become targets of {target}' in words


def test_dtypes_are_one_or_a_mapping_or_a_rule():
    case = everything(ALONE)
    del case.transfers['steps'], case.transfers['row']
    by_name = {name: case.source_dtype(name) for name in case.transfers}
    for dtype in (case.source_dtype, by_name):
        for target_dtype in (case.target_dtype, {name: case.target_dtype(name) for name in by_name}):
            targets = case.targets(0)
            case.compile(0, case.sources(0, 0), targets, dtype=dtype, target_dtype=target_dtype).run()
            assert case.wrong(targets, 0, 0) == []
    del by_name['cast']
    for options in (dict(dtype=by_name), dict(target_dtype=by_name)):
        words = refusal(lambda options=options: case.compile(0, case.sources(0, 0), case.targets(0), **options))
        assert f"parameter 'cast' has no entry in {list(options)[0]}" in words
    words = refusal(lambda: case.compile(0, case.sources(0, 0), case.targets(0), dtype=torch.float32))
    assert "'layers.0.w'" in words and 'buffer of torch.bfloat16; expected torch.float32' in words
    words = refusal(lambda: case.compile(0, case.sources(0, 0), case.targets(0), target_dtype=torch.float32))
    assert "'cast' was planned for 2 bytes per element; torch.float32 has 4" in words


def test_one_dtype_holds_for_a_whole_model():
    case = everything(ALONE)
    for name in ('steps', 'row', 'cast', 'layers.0.w', 'layers.1.w'):
        del case.transfers[name]
    targets = case.targets(0)
    case.compile(0, case.sources(0, 0), targets, dtype=torch.float32, target_dtype=None).run()
    assert case.wrong(targets, 0, 0) == []


@pytest.mark.parametrize('options, words', [
    (dict(staged=1), 'staged is 1; expected a bool'),
    (dict(verify='yes'), "verify is 'yes'; expected a bool"),
    (dict(multicast=True), 'multicast is True; expected "auto" or "off"'),
    (dict(nodes=[0, 1]), 'nodes are a list; expected a mapping'),
    (dict(progress=5), 'progress is a int; expected a function'),
    (dict(budget=64), 'budget is a int; expected StagingBudget'),
    (dict(timeout=0), 'timeout is 0; expected a positive number'),
])
def test_options_are_checked(options, words):
    assert words in refusal(lambda: one_dtype(torch.float32, **options))


# Progress


def test_progress_counts_bytes_up_to_all_of_them():
    case, seen = everything(ALONE), []
    targets = case.targets(0)
    program = case.compile(0, case.sources(0, 0), targets, progress=lambda *state: seen.append(state))
    for _ in range(2):
        seen.clear()
        stats = program.run()
        assert seen[-1] == (stats.local_copy_bytes, stats.local_copy_bytes)
        assert seen == sorted(seen) and {total for _, total in seen} == {stats.local_copy_bytes}


class Interruption(Exception):
    """What a callback raises."""


def test_what_a_callback_raises_reaches_the_caller_and_staged_targets_are_as_they_were():
    case, failing = everything(ALONE), [True]

    def callback(done, total):
        if failing:
            raise Interruption()

    targets = case.targets(0)
    before = copied(targets)
    program = case.compile(0, case.sources(0, 0), targets, progress=callback, staged=True)
    with pytest.raises(Interruption):
        program.run()
    assert differing(targets, before) == []
    failing.clear()
    program.run()
    assert case.wrong(targets, 0, 0) == []


def test_the_bar_shows_its_description_and_how_far_it_is(capsys):
    case = everything(ALONE)
    targets = case.targets(0)
    with progress_bar('weights of step 7') as progress:
        stats = case.compile(0, case.sources(0, 0), targets, progress=progress).run()
    shown = capsys.readouterr().out
    assert 'weights of step 7' in shown and f'{stats.local_copy_bytes}/{stats.local_copy_bytes} bytes' in shown
    assert case.wrong(targets, 0, 0) == []


def test_the_bar_alone_needs_rich():
    script = '''
import sys
sys.modules['rich'] = None
from deepspeed.checkpoint.affine_transfer_executor import progress_bar
try:
    with progress_bar():
        print('a bar')
except ImportError:
    print('no bar')
'''
    shown = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, timeout=120)
    assert shown.stdout.splitlines()[-1:] == ['no bar'], shown.stderr


# Over a group


def runs_often(world, turn, endpoints, options, lies):
    """Five runs of one program with other values each; the last run's stats."""
    case, me = everything(endpoints, size=30), world.rank
    options = dict(options)
    plan = case.plan(me if options.pop('own', ()).count(me) else None)
    sources, targets = case.sources(me, 0, lies[0]), case.targets(me, lies[1])
    program = case.compile(me, sources, targets, standing_group(world), plan=plan, budget=SMALL, **options)
    for seed in range(5):
        case.refill(sources, me, seed)
        stats = program.run()
        assert case.wrong(targets, me, seed) == []
    program.rebind(case.sources(me, 9, lies[1]))
    program.run()
    assert case.wrong(targets, me, 9) == []
    return stats


def remote_bytes(case):
    links = case.plan().link_bytes()
    return int(links.numbytes[links.source != links.target].sum())


@pytest.mark.parametrize('endpoints', [APART, CROSSED])
@pytest.mark.parametrize('options, lies', [
    (dict(multicast='off'), (DENSE, DENSE)),
    (dict(), (OFFSET, TURNED)),
    (dict(own=(0, 1, 2, 3)), (GAPS, DENSE)),
    (dict(own=(1, 2), multicast='off'), (DENSE, GAPS)),
    (dict(staged=True), (TURNED, OFFSET)),
    (dict(verify=True), (DENSE, DENSE)),
    (dict(staged=True, verify=True, own=(0, 1, 2, 3)), (GAPS, TURNED)),
])
def test_every_run_is_exact_on_every_process(pool, endpoints, options, lies):
    stats = pool.run(runs_often, endpoints, options, lies)
    sent, received = (sum(getattr(one, f'{side}_bytes') for one in stats) for side in ('sent', 'received'))
    # The plan is the same whoever forwards: as many bytes arrive, and each arrives once.
    assert sent == received == remote_bytes(everything(endpoints, size=30))
    for rank, one in enumerate(stats):
        check_report(rank, one, stats, options)


def check_report(rank, one, stats, options):
    """The report of one process agrees with those of all."""
    assert one.rounds == stats[0].rounds and one.busiest_sender == stats[0].busiest_sender
    for side in ('sent', 'received'):
        most = getattr(one, 'busiest_sender' if side == 'sent' else 'busiest_receiver')
        totals = [getattr(other, f'{side}_bytes') for other in stats]
        assert most == (totals.index(max(totals)), max(totals))
    assert 0 <= one.forwarded_bytes <= one.sent_bytes and one.overhead_bytes > 0
    assert 0 < one.wire_efficiency <= 1 and one.packed_bytes <= one.sent_bytes + one.received_bytes
    assert (one.seconds['switch'] > 0) == bool(options.get('staged'))
    assert (one.seconds['verify'] > 0) == bool(options.get('verify'))
    assert all(took >= 0 for took in one.seconds.values())
    text = str(one)
    for words in (f'{one.segments} segments in ', f'in {one.chunks} messages and {one.rounds} rounds',
                  f'wire efficiency {one.wire_efficiency:.4f}',
                  f'busiest sender: process {one.busiest_sender[0]} with ',
                  f'busiest receiver: process {one.busiest_receiver[0]} with '):
        assert words in text
    assert re.search(r'copied locally \d', text) and re.search(r'packed \d.* of staging memory', text)


def one_of_each_kind_of_plan(world, turn):
    """Whole plans on some processes and own ones on others, where receivers might pass bytes on."""
    case, me = everything(APART), world.rank
    targets = case.targets(me)
    return refusal(lambda: case.compile(
        me, case.sources(me, 0), targets, standing_group(world), plan=case.plan(me if me % 2 else None)))


def test_only_with_plans_of_all_processes_do_all_pass_on(pool):
    words = pool.run(one_of_each_kind_of_plan)
    assert len(set(words)) == 1 and 'options differ (processes 0, 2 against processes 1, 3)' in words[0]


def on_a_part_of_the_world(world):
    world.init_default_group()
    # Ranks in the group are those of the list, whatever the processes are called elsewhere.
    group = dist.new_group([3, 1, 2])
    if world.rank == 0:
        words = refusal(lambda: everything(CROSSED).compile(0, {}, {}, group))
        assert 'not in the group' in words
    else:
        run_three_times(dist.get_rank(group), group)
    mine = torch.tensor([world.rank])
    dist.all_reduce(mine)
    return mine.item(), dist.get_world_size()


def run_three_times(me, group, endpoints=CROSSED):
    case = everything(endpoints)
    sources, targets = case.sources(me, 0), case.targets(me)
    program = case.compile(me, sources, targets, group)
    for seed in range(3):
        case.refill(sources, me, seed)
        program.run()
        assert case.wrong(targets, me, seed) == []


def test_a_program_on_a_part_of_the_world():
    assert run_processes(4, on_a_part_of_the_world) == [(6, 4)] * 4


def beside_two_worlds(world):
    world.init_default_group(f'job {world.rank // 2}', rank=world.rank % 2, size=2)
    with join_transfer_group(world.store('joint'), world.rank, 4, timeout=PATIENCE) as group:
        run_three_times(world.rank, group, APART)
    mine = torch.tensor([world.rank])
    dist.all_reduce(mine)
    return mine.item(), dist.get_world_size()


def test_a_program_of_two_jobs():
    assert run_processes(4, beside_two_worlds) == [(1, 2), (1, 2), (5, 2), (5, 2)]


def two_programs(world, turn):
    """Programs of one group take turns."""
    me, group = world.rank, standing_group(world)
    cases = everything(APART), everything(CROSSED, size=3)
    made = []
    for case in cases:
        sources, targets = case.sources(me, 0), case.targets(me)
        made.append((case, sources, targets, case.compile(me, sources, targets, group)))
    for seed in range(4):
        for case, sources, targets, program in made if seed % 2 else made[::-1]:
            case.refill(sources, me, seed)
            program.run()
            assert case.wrong(targets, me, seed) == []
    # Each process must run the same one; else all refuse.
    words = refusal(made[me % 2][3].run)
    made[0][3].run()
    return words


def test_programs_of_one_group_take_turns(pool):
    words = pool.run(two_programs)
    assert len(set(words)) == 1 and 'their programs differ (processes 0, 2 against processes 1, 3)' in words[0]
    assert 'before it began' in words[0]


# Refused between runs


def damaged_between_runs(world, turn, guilty, side):
    case, me = everything(APART), world.rank
    sources, targets = case.sources(me, 0), case.targets(me)
    program = case.compile(me, sources, targets, standing_group(world))
    words = []
    for seed, damage in enumerate(DAMAGES):
        if me == guilty:
            damage((sources if side == 'source' else targets)['norm'][guilty % 2])
        kept = {name: dict(held) for name, held in targets.items()}
        if me == guilty and side == 'target':
            del kept['norm'][guilty % 2]
        before = copied(kept)
        with counted_operations() as operations:
            words.append(refusal(program.run))
        assert operations == [] and differing(targets, before) == []
        if me == guilty:
            sources, targets = case.sources(me, seed), case.targets(me)
            program.rebind(sources, targets)
        case.refill(sources, me, seed + 1)
        program.run()
        assert case.wrong(targets, me, seed + 1) == []
    return words


@pytest.mark.parametrize('guilty, side', [(1, 'source'), (2, 'target')])
def test_what_one_process_did_to_a_buffer_is_refused_by_all_before_a_byte_moves(pool, guilty, side):
    words = pool.run(damaged_between_runs, guilty, side)
    assert words == [words[0]] * 4
    for text in words[0]:
        assert 'before it began' in text and f'process {guilty} rejected the transfer batch' in text
        assert re.search(rf"parameter 'norm': {side} location {guilty % 2} had \d elements at 0x", text)


def tampered_plan(world, turn, guilty, whole):
    """One process's plan says that one segment reads one element further on."""
    case, me = everything(APART), world.rank
    plan = case.plan(None if whole else me)
    if me == guilty:
        plan = shifted(plan, guilty)
    targets = case.targets(me)
    before = copied(targets)
    words = refusal(lambda: case.compile(me, case.sources(me, 0), targets, standing_group(world), plan=plan))
    assert differing(targets, before) == []
    run_three_times(me, standing_group(world), APART)
    return words


def shifted(plan, guilty):
    """The plan, in which the first segment from process 1 reads one element beside its own."""
    number = plan.variant_of[plan.names.index('layers.0.w')]
    variant = plan.variants[number]
    row = int(((variant.source_process == 1) & (variant.target_process == guilty)).nonzero()[0][0])
    offset = variant.columns.source_offset.copy()
    offset[row] += 1 if offset[row] == 0 else -1
    altered = replace(variant, columns=replace(variant.columns, source_offset=offset))
    return replace(plan, variants=(*plan.variants[:number], altered, *plan.variants[number + 1:]))


@pytest.mark.parametrize('whole', [False, True])
@pytest.mark.parametrize('guilty', [2, 3])
def test_links_whose_ends_differ_are_named_on_every_process(pool, guilty, whole):
    words = pool.run(tampered_plan, guilty, whole)
    assert len(set(words)) == 1 and 'before it began' in words[0]
    assert f'process {guilty} rejected the transfer batch: its plan lists other segments for what it receives from ' \
           'process 1' in words[0]


# Staging


def all_to_all(world, turn, budget, options):
    """From rows to columns on four processes, each of which exchanges with all others."""
    me, full = world.rank, values(24 * 24, torch.float32).view(24, 24)
    everywhere = {part: part for part in range(4)}
    target = torch.zeros(24, 6)
    with counted_operations() as operations:
        program = compile_transfer(matrix_plan(24, 24, 4, 4), {me: matrix_source(full, 4, me)}, {me: target},
                                   TransferEndpoints(everywhere, everywhere),
                                   torch.float32,
                                   group=standing_group(world),
                                   budget=budget,
                                   timeout=PATIENCE,
                                   **options)
        stats = program.run()
    assert same_bits(target, matrix_target(full, 4, me))
    return stats, max(operations)


@pytest.mark.parametrize('options', [{}, dict(verify=True), dict(staged=True)])
@pytest.mark.parametrize('operations', [2, 3, 4, 5, 64])
def test_a_round_has_no_more_operations_than_the_budget_says(pool, operations, options):
    for stats, most in pool.run(all_to_all, StagingBudget(60, operations=operations), options):
        assert most <= operations
        assert 0 < stats.peak_staging_bytes <= 2 * 60 * (min(operations // 2 * 2, 6) + bool(options.get('verify')))


@pytest.mark.parametrize('options', [{}, dict(verify=True)])
@pytest.mark.parametrize('numbytes', [4 * 14, 400, 1000, 1 << 20])
def test_staging_memory_has_a_cap_for_the_whole_process(pool, numbytes, options):
    stats = [one for one, _ in pool.run(all_to_all, StagingBudget(1 << 20, bytes_per_process=numbytes), options)]
    assert all(one.peak_staging_bytes <= numbytes for one in stats)
    # Where a message holds one element, that is read and written in place.
    assert all(one.peak_staging_bytes > 0 for one in stats) or numbytes == 4 * 14


def too_little(world, turn, numbytes):
    case, me = everything(APART), world.rank
    targets = case.targets(me)
    before = copied(targets)
    words = refusal(lambda: case.compile(
        me, case.sources(me, 0), targets, standing_group(world), budget=StagingBudget(bytes_per_process=numbytes)))
    assert differing(targets, before) == []
    run_three_times(me, standing_group(world), APART)
    return words


def test_a_cap_that_holds_not_one_element_is_refused_by_all(pool):
    words = pool.run(too_little, 31)
    assert len(set(words)) == 1 and 'bytes_per_process is 31' in words[0] and 'before it began' in words[0]


# Verification


def verified(world, turn, guilty, how, staged):
    """One run that goes wrong on one process, which verification must find, and one that does not."""
    case, me, spoiling = everything(APART), world.rank, [True]

    def spoil(done, total):
        if spoiling and me == guilty and done == total and how != 'message':
            (sources if how == 'source' else targets)['embed'][guilty % 2].view(-1).view(torch.uint8)[0] ^= 1

    sources, targets = case.sources(me, 0), case.targets(me)
    before = copied(targets)
    program = case.compile(me, sources, targets, standing_group(world), staged=staged, verify=True, progress=spoil)
    with altered_receive() if me == guilty and how == 'message' else nullcontext():
        words = refusal(program.run)
    if staged:
        assert differing(targets, before) == []
    wrong = case.wrong(targets, me, 0)
    spoiling.clear()
    case.refill(sources, me, 1)
    program.run()
    assert case.wrong(targets, me, 1) == []
    return words, wrong


@pytest.mark.parametrize('staged', [False, True])
@pytest.mark.parametrize('guilty, how', [(2, 'message'), (3, 'message'), (1, 'source')])
def test_what_did_not_arrive_as_it_was_sent_is_named_on_every_process(pool, guilty, how, staged):
    results = pool.run(verified, guilty, how, staged)
    words, = {text for text, _ in results}
    assert ('no target has changed' in words) == staged and 'verified' in words
    if how == 'source':
        assert re.search(r"process [23] rejected the transfer batch: parameter '(embed|head)' from process 1", words)
        return
    found = re.findall(r"process (\d) rejected the transfer batch: (parameter '.*' from process [01]) is not what",
                       words)
    assert [int(rank) for rank, _ in found] == [guilty]
    if not staged:
        (name, _), = results[guilty][1]
        assert f"parameter '{name}'" in found[0][1]


def test_a_target_that_was_written_meanwhile_is_found(pool):
    words, = {text for text, _ in pool.run(verified, 2, 'target', False)}
    assert re.search(r"process 2 rejected the transfer batch: parameter 'embed' from process [01] is not", words)


@pytest.mark.parametrize('side', ['source', 'target'])
def test_a_local_copy_is_verified_too(side):
    case, spoiling = everything(ALONE), [True]

    def spoil(done, total):
        if spoiling and done == total:
            (sources if side == 'source' else targets)['norm'][0].view(torch.uint8)[0] ^= 1

    sources, targets = case.sources(0, 0), case.targets(0)
    program = case.compile(0, sources, targets, verify=True, progress=spoil)
    assert "parameter 'norm' from this process is not what was sent" in refusal(program.run)
    spoiling.clear()
    case.refill(sources, 0, 1)
    program.run()
    assert case.wrong(targets, 0, 1) == []


# Staged targets


def broken_in_flight(world, turn, guilty, number):
    """Process ``guilty`` fails after so many steps; everybody's targets are as they were."""
    case, me, steps = everything(APART, size=30), world.rank, []

    def fail(done, total):
        steps.append(done)
        if me == guilty and len(steps) == number + 1:
            raise Interruption('enough')

    targets = case.targets(me)
    before = copied(targets)
    with join_transfer_group(world.store(turn), me, world.size, timeout=PATIENCE) as group:
        program = case.compile(me, case.sources(me, 0), targets, group, staged=True, progress=fail, budget=SMALL)
        with pytest.raises(TransferBrokenError, match='no target (of this process )?has changed'):
            program.run()
        assert differing(targets, before) == []
        with pytest.raises(TransferBrokenError, match='cannot be used any more'):
            program.run()
    return differing(targets, before)


@pytest.mark.parametrize('guilty, number', [(0, 0), (1, 3), (2, 0), (3, 5)])
def test_staged_targets_are_as_they_were_wherever_a_process_fails(pool, guilty, number):
    assert pool.run(broken_in_flight, guilty, number) == [[]] * 4


# For days


def resident_bytes():
    with open('/proc/self/statm') as table:
        return int(table.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def alive():
    """Tensors, open operations and threads of this process.

    The fewest of several counts: gloo's own threads let go of the tensors of an operation some moments after it ended.
    """

    def count():
        time.sleep(0.05)
        gc.collect()
        kinds = [type(item) for item in gc.get_objects()]
        return sum(issubclass(kind, torch.Tensor) for kind in kinds), kinds.count(Pending), threading.active_count()

    return tuple(map(min, zip(*(count() for _ in range(10)))))


def a_hundred_runs(world, turn, options):
    case, me = everything(APART, size=3000), world.rank
    wanted = [case.expected(me, seed) for seed in range(2)]
    sources, targets = case.sources(me, 0), case.targets(me)
    others = case.sources(me, 1)
    program = case.compile(me, sources, targets, standing_group(world), budget=StagingBudget(100_000), **options)
    early = ()
    for step in range(100):
        program.rebind(sources) if step % 2 == 0 else program.rebind(others)
        program.run()
        assert differing(targets, wanted[step % 2]) == []
        if step == 19:
            early = *alive(), resident_bytes()
    return early, (*alive(), resident_bytes())


@pytest.mark.parametrize('options', [{}, dict(staged=True, verify=True)])
def test_a_hundred_runs_take_no_more_memory_than_twenty(pool, options):
    for early, late in pool.run(a_hundred_runs, options):
        assert late[:3] == early[:3] and late[1] == 0
        # What one process receives in the eighty runs between them takes forty times this.
        assert late[3] - early[3] <= 2 << 20
