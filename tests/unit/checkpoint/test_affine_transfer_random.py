# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Random models, in every dtype that can be moved, between real processes, against the oracle."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import affine_strategies
from affine_oracle import split_contents, zero3_contents
from affine_fault_points import counted_operations
from affine_plans import DTYPES
from affine_pool import Pool, standing_group
from affine_transfer_cases import DENSE, GAPS, OFFSET, TURNED, Case, copied, differing
from deepspeed.checkpoint.affine import contiguous_split_map, zero3_partition_map
from deepspeed.checkpoint.affine_transfer import ParameterTransfer, TransferEndpoints
from deepspeed.checkpoint.affine_transfer_executor import StagingBudget

# Older releases of torch lack some of them.
FLOAT8 = [
    getattr(torch, name)
    for name in ('float8_e4m3fn', 'float8_e4m3fnuz', 'float8_e5m2', 'float8_e5m2fnuz', 'float8_e8m0fnu')
    if hasattr(torch, name)
]
MOVABLE = tuple(dict.fromkeys([*DTYPES, *FLOAT8]))
CAST = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
SCALED = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Example:
    """A case on the first ``size`` processes; ``own`` of them plan for themselves alone."""
    case: Case
    size: int
    own: tuple
    lies: tuple
    options: dict

    def __repr__(self):
        entries = {
            name: (entry.source_dtype, entry.wire_dtype, entry.source, entry.source_map.to_dict(),
                   entry.target_map.to_dict())
            for name, entry in self.case.transfers.items()
        }
        return f'Example({entries}, {self.case.endpoints}, size={self.size}, own={self.own}, lies={self.lies}, ' \
               f'{self.options})'


KINDS = ('plain', 'plain', 'replicas', 'cast', 'scaled', 'from slabs', 'to slabs')


@st.composite
def parameters(draw, kinds):
    """A ParameterTransfer and its contents: plain, cast, scaled, from slabs of larger parameters, or to them."""
    kind = draw(st.sampled_from(kinds))
    shape = draw(affine_strategies.shapes(min_axes=1 if kind.endswith('slabs') else 0, max_axes=3))
    options = {}
    dtype = draw(st.sampled_from(MOVABLE))
    source, target = affine_strategies.layouts(shape), affine_strategies.layouts(shape)
    if kind == 'replicas':
        target = affine_strategies.replicated(shape)
    elif kind == 'cast':
        dtype, options['target_dtype'] = draw(st.sampled_from([(one, other) for one in CAST for other in CAST]))
    elif kind == 'scaled':
        source = target = affine_strategies.scaled_layouts(shape, st.sampled_from([1.0, 0.5, 2.0]))
        dtype, options['scale_power'] = draw(st.sampled_from(SCALED)), 1
    elif kind == 'from slabs':
        source = affine_strategies.narrowings(shape)
    elif kind == 'to slabs':
        target, options['partial_targets'] = affine_strategies.narrowings(shape), True
    source, target = draw(source), draw(target)
    return ParameterTransfer(target.map, source.map, dtype, **options), (source.contents, target.contents)


@st.composite
def examples(draw):
    # From one process to replicas on the others, or any way at all.
    fans_out = draw(st.sampled_from([False, False, True]))
    transfers, contents = {}, {}
    for number in range(draw(st.integers(1, 4))):
        # Names whose order is not that of their numbers.
        name = f'{number * 7 % 11}.weight'
        transfers[name], contents[name] = draw(parameters(('plain', 'replicas', 'replicas') if fans_out else KINDS))
    if draw(st.booleans()):
        name = sorted(transfers)[0]
        entry = transfers[name]
        target = draw(affine_strategies.layouts(entry.source_map.logical_shape))
        if entry.scale_power is None:
            transfers['tied'] = ParameterTransfer(target.map, entry.source_map, entry.source_dtype, source=name)
            contents['tied'] = contents[name][0], target.contents
    size = draw(st.integers(3 if fans_out else 2, 4))
    ends = [owners(draw, {location for pair in contents.values() for location in pair[side]}, size) for side in (0, 1)]
    if fans_out:
        ends = [dict.fromkeys(ends[0], 0), {location: 1 + location % (size - 1) for location in ends[1]}]
    nodes = draw(st.sampled_from([None, None, lambda process: process // 2, lambda process: process % 2]))
    nodes = nodes and {process: nodes(process) for process in range(size)}
    case = Case(transfers, contents, TransferEndpoints(*ends), nodes)
    options = dict(staged=draw(st.booleans()),
                   verify=draw(st.booleans()),
                   multicast=draw(st.sampled_from(['auto', 'auto', 'off'])),
                   nodes=nodes,
                   budget=StagingBudget(draw(st.sampled_from([16, 17, 40, 64, 1000, 1 << 20])),
                                        bytes_per_process=draw(st.sampled_from([2080, 5000, 1 << 20])),
                                        operations=draw(st.sampled_from([2, 3, 4, 64])),
                                        direct_bytes=draw(st.sampled_from([1, 16, 100, 1 << 20]))))
    # Plans of all processes and of one each agree only where nobody passes on.
    own = draw(
        st.sampled_from([(), (), tuple(range(size))] + ([(0, ), (1, )] if options['multicast'] == 'off' else [])))
    lies = tuple(draw(st.sampled_from([DENSE, OFFSET, GAPS, TURNED])) for _ in range(2))
    return Example(case, size, own, lies, options)


def owners(draw, locations, size):
    numbers = np.random.RandomState(draw(st.integers(0, 2**16))).randint(0, size, len(locations))
    return dict(zip(sorted(locations), numbers.tolist()))


RUNS = 2


def transfer(world, turn, example):
    """Run an example: what is wrong here, the last run's stats, most operations in a round, and what was in the way of
    the progress."""
    me, case = world.rank, example.case
    if me >= example.size:
        return None
    seen = []
    sources, targets = case.sources(me, 0, example.lies[0]), case.targets(me, example.lies[1])
    program = case.compile(me,
                           sources,
                           targets,
                           standing_group(world, example.size),
                           plan=case.plan(me if me in example.own else None),
                           progress=lambda *state: seen.append(state),
                           **example.options)
    wrong = []
    for seed in range(RUNS):
        case.refill(sources, me, seed)
        before = copied(sources)
        seen.clear()
        with counted_operations() as operations:
            stats = program.run()
        wrong += [(seed, *where) for where in case.wrong(targets, me, seed)]
        wrong += [(seed, 'source changed', *where) for where in differing(sources, before)]
    total = stats.sent_bytes + stats.received_bytes + stats.local_copy_bytes
    in_order = seen == sorted(seen) and seen[-1:] == ([(total, total)] if total else [])
    return wrong, stats, max(operations, default=0), in_order


@pytest.fixture(scope='module')
def pool():
    with Pool(4) as workers:
        yield workers


@settings(max_examples=150)
@given(example=examples())
def test_random_models_arrive_exactly(pool, example):
    results = pool.run(transfer, example)[:example.size]
    assert [wrong for wrong, _, _, _ in results] == [[]] * example.size
    stats = [one for _, one, _, _ in results]
    budget = example.options['budget']
    links = example.case.plan().link_bytes()
    remote = int(links.numbytes[links.source != links.target].sum())
    sent, received = (sum(getattr(one, f'{side}_bytes') for one in stats) for side in ('sent', 'received'))
    assert sent == received
    # A process that needs a block twice receives it once where processes pass on, and may keep a copy of it.
    assert sent == remote or example.options['multicast'] == 'auto' and not example.own and sent < remote
    kept = sum(one.local_copy_bytes + one.in_place_bytes for one in stats)
    assert sent + kept == int(links.numbytes.sum())
    assert len({one.rounds for one in stats}) == 1
    for _, one, operations, in_order in results:
        assert in_order and operations <= budget.operations
        assert one.peak_staging_bytes <= budget.bytes_per_process
    event('remote' if remote else 'local only')
    event('passed on' if any(one.forwarded_bytes for one in stats) else 'not passed on')
    event('several rounds' if stats[0].rounds > 2 else 'few rounds')


@pytest.mark.parametrize('dtype', MOVABLE, ids=str)
def test_every_dtype_is_moved(pool, dtype):
    # The random models may leave one out.
    assert pool.run(of_dtype, dtype) == [True] * 4


def of_dtype(world, turn, dtype):
    me, shape = world.rank, (13, 9)
    entry = ParameterTransfer(contiguous_split_map(shape, [2, 3, 4], 1), zero3_partition_map(shape, 4), dtype)
    case = Case({'w': entry}, {'w': (zero3_contents(shape, 4), split_contents(shape, [2, 3, 4], 1))},
                TransferEndpoints({part: part
                                   for part in range(4)}, {
                                       0: 1,
                                       1: 3,
                                       2: 0
                                   }))
    sources, targets = case.sources(me, 0), case.targets(me, GAPS)
    case.compile(me, sources, targets, standing_group(world), staged=True, verify=True, budget=StagingBudget(64)).run()
    return case.wrong(targets, me, 0) == []
