# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whole-model plans: exact, the same for one process as for all, balanced, and summed without segment objects."""

import hashlib
import itertools
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from affine_models import contested_models, models, replica_model, same_columns, same_plans
from affine_oracle import addresses, contents_holders, count
from deepspeed.checkpoint.affine import (AffinePiece, ParamAffineMap, concat_affine_maps, contiguous_split_map,
                                         relabel, replicated_map, zero3_partition_map)
from deepspeed.checkpoint.affine_transfer import (AffineTransferError, InvalidMapError, InvalidReplicaPolicyError,
                                                  ParameterTransfer, PlanBudget, TransferEndpoints, TransferSegment,
                                                  UnsupportedLayoutError, model, plan_transfer, plan_transfers,
                                                  save_model_plan)
from deepspeed.checkpoint.affine_transfer.verify import check_plan as prove


def _by_parity(request):
    """A deterministic callable: a holder that depends on who reads."""
    ranks = [candidate.source_rank for candidate in request.candidates]
    return ranks[-1] if request.target_rank % 2 else ranks[0]


NAMED = ('first_holder', 'local_first_least_loaded', 'balanced')
POLICIES = (*NAMED, _by_parity)
every_policy = pytest.mark.parametrize('policy', POLICIES, ids=str)

# --------------------------------------------------------------------- any model, any policy, any process


def _check_processes(policy, some):
    """The plan of every process is its part of the plan of all."""
    whole = some.plan(policy)
    for process in [*some.processes, 99]:
        own = some.plan(policy, process=process)
        expected = dict(whole.of_process(process))
        assert own.process == process and own.names == whole.names and own.sources == whole.sources
        for name in whole:
            found = own[name].columns
            assert same_columns(found, expected[name]) if name in expected else len(found) == 0
        assert own.balance == whole.balance
    return whole


@every_policy
@settings(max_examples=40)
@given(models())
def test_the_plans_of_all_processes_are_the_plan_of_the_model(policy, some):
    whole = _check_processes(policy, some)
    some.check(whole)
    assert same_plans(some.rebuilt().plan(policy), whole)
    assert same_plans(some.rebuilt(every=2).plan(policy), whole)
    assert same_plans(some.shared().plan(policy), whole)


@pytest.mark.parametrize('policy', NAMED)
@settings(max_examples=80)
@given(contested_models())
def test_much_choice_is_decided_by_every_process_alike(policy, some):
    some.check(_check_processes(policy, some))


def test_a_process_that_knows_fewer_holders_takes_the_same_turns():
    """Slabs with three and with two holders: process 3 never sees that some slab has three."""
    slabs = [relabel(replicated_map((3, 4), 3), {}), relabel(replicated_map((3, 4), 2), {0: 3, 1: 4})]
    entry = ParameterTransfer(contiguous_split_map((6, 4), [3, 3], 0), concat_affine_maps(slabs, 0), torch.float32)
    transfers = {f'layer.{index}': entry for index in range(7)}
    endpoints = TransferEndpoints({location: location for location in range(5)}, {0: 10, 1: 11})
    whole = plan_transfers(transfers, endpoints=endpoints)
    own = plan_transfers(transfers, endpoints=endpoints, process=3)
    assert [name for name, _ in own.of_process(3)] == [f'layer.{index}' for index in (0, 2, 4, 6)]
    assert [name for name, _ in whole.of_process(3)] == [f'layer.{index}' for index in (0, 2, 4, 6)]


@every_policy
def test_one_parameter_is_planned_as_plan_transfer_does(policy):
    source = zero3_partition_map((6, 10), 4, locations=[[0, 1, 2, 3], [7, 6, 5, 4]])
    target = contiguous_split_map((6, 10), [4, 3, 3], 1)
    endpoints = TransferEndpoints({location: location for location in range(8)}, {0: 5, 1: 0, 2: 9})
    whole = plan_transfers({'weight': ParameterTransfer(target, source, torch.float32)},
                           endpoints=endpoints,
                           replica_policy=policy)
    if policy == 'balanced':
        assert whole['weight'].moved_elements == 60
    elif callable(policy):
        assert whole['weight'] == plan_transfer(target, source, replica_selector=policy)
    else:
        assert whole['weight'] == plan_transfer(target, source, replica_policy=policy, endpoints=endpoints)


def test_an_empty_model_has_an_empty_plan():
    whole = plan_transfers({}, endpoints=TransferEndpoints({}, {}), replica_policy='balanced')
    assert list(whole) == [] and whole.segments == 0 and whole.local_bytes() == 0
    assert whole.sent_bytes() == {} and list(whole.of_process(0)) == []


# ------------------------------------------------------------------------------- what is read from where


def _distances(some, plan):
    """For each segment how far its source is, and how far the nearest holder: 0 process, 1 node, 2 elsewhere."""
    node = some.nodes or {process: process for process in some.processes}
    for name in plan:
        source, _ = some.layouts[name]
        held = contents_holders(count(source.shape), source.contents)
        for segment in plan[name].segments:
            reader = some.endpoints.target[segment.target_rank]
            far = {
                location: 0 if owner == reader else 1 if node[owner] == node[reader] else 2
                for location, owner in some.endpoints.source.items()
            }
            read = addresses(segment.shape, segment.source_offset, segment.source_strides)
            for element in source.contents[segment.source_rank][read].tolist():
                yield far[segment.source_rank], min(far[holder] for holder in held[element])


@pytest.mark.parametrize('policy', ['local_first_least_loaded', 'balanced'])
@settings(max_examples=40)
@given(models(scaled=False) | contested_models())
def test_nothing_is_read_from_further_away_than_it_must(policy, some):
    distances = list(_distances(some, some.plan(policy)))
    assert all(found == nearest for found, nearest in distances)
    assert len(distances) == sum(plan.moved_elements for plan in some.plan(policy).values())


EVEN, UNEVEN = [40] * 64, [96 + 37 * reader % 23 for reader in range(64)]
VERY_UNEVEN = [1 + 37 * reader * reader % 97 for reader in range(64)]


@pytest.mark.parametrize('count_of_parameters', [1, 3, 32])
@pytest.mark.parametrize('sizes', [EVEN, UNEVEN], ids=['even', 'uneven'])
def test_eight_replicas_serve_64_readers_evenly(sizes, count_of_parameters):
    some = replica_model(sizes, 8, count_of_parameters)
    bound = sum(sizes) * 4 * 2 * count_of_parameters / 8
    assert max(some.plan('local_first_least_loaded').sent_bytes().values()) <= 1.05 * bound
    balanced = some.plan('balanced')
    assert max(balanced.sent_bytes().values()) <= 1.01 * bound
    assert balanced.balance.busiest_bytes == max(balanced.sent_bytes().values())
    assert balanced.balance.lower_bound_bytes == -(-int(bound * 8) // 8)


def test_turns_even_out_over_a_model_whatever_readers_take():
    some = replica_model(VERY_UNEVEN, 8, 32)
    bound = sum(VERY_UNEVEN) * 4 * 2 * 32 / 8
    assert set(some.plan('local_first_least_loaded').sent_bytes().values()) == {bound}


@pytest.mark.parametrize('policy', ['local_first_least_loaded', 'balanced'])
def test_processes_share_the_load_however_many_copies_they_hold(policy):
    some = replica_model([8], 3, 12)
    some = replace(some, endpoints=TransferEndpoints({0: 0, 1: 0, 2: 1}, {0: 5}))
    assert some.plan(policy).sent_bytes() == {0: 384, 1: 384}


def test_balanced_spreads_over_nodes_where_processes_are_level():
    """Four holders on two nodes and one reader elsewhere: two parameters come from two nodes."""
    some = replace(replica_model([8], 4, 2), nodes={0: 0, 1: 0, 2: 1, 3: 1, 4: 2})
    report = some.plan('balanced').balance
    assert (report.busiest_bytes, report.busiest_node_bytes, report.node_lower_bound_bytes) == (64, 64, 64)


@dataclass(frozen=True)
class Choices:
    """A model small enough to try everything: for each read its bytes, its reader and the processes that hold it."""
    some: object
    reads: tuple

    def loads(self, node, allowed):
        """Least possible bytes of the busiest process, and of the busiest node to others, over all choices."""
        options = [allowed(reader, holders) for _, reader, holders in self.reads]
        best = [None, None]
        for choice in itertools.product(*options):
            process, across = defaultdict(int), defaultdict(int)
            for sender, (size, reader, _) in zip(choice, self.reads):
                process[sender] += size * (sender != reader)
                across[node(sender)] += size * (node(sender) != node(reader))
            tops = max(process.values()), max(across.values())
            best = [top if least is None else min(least, top) for least, top in zip(best, tops)]
        return best


@st.composite
def small_choices(draw):
    """One to two slabs of rows, each held by up to three processes, read whole by one to three processes."""
    widths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    groups = [sorted(draw(st.sets(st.integers(0, 4), min_size=1, max_size=3))) for _ in widths]
    slabs, owners = [], {}
    for index, (width, group) in enumerate(zip(widths, groups)):
        ids = [10 * index + place for place in range(len(group))]
        slabs.append(relabel(replicated_map((width, 3), len(group)), dict(enumerate(ids))))
        owners.update(zip(ids, group))
    readers = draw(st.lists(st.integers(3, 7), min_size=1, max_size=3, unique=True))
    parameters = draw(st.integers(1, 6 // (len(widths) * len(readers)) or 1))
    shape = sum(widths), 3
    entry = ParameterTransfer(replicated_map(shape, len(readers)), concat_affine_maps(slabs, 0), torch.float16)
    some = replace(replica_model([1], 1, 1),
                   transfers={f'{index}': entry
                              for index in range(parameters)},
                   endpoints=TransferEndpoints(owners, dict(enumerate(readers))))
    reads = [(width * 6, reader, tuple(group)) for width, group in zip(widths, groups) for reader in readers]
    return Choices(some, tuple(reads * parameters))


@settings(max_examples=80)
@given(small_choices())
def test_no_choice_at_all_beats_the_bounds(choices):
    whole = choices.some.plan('balanced')
    report, sent = whole.balance, whole.sent_bytes()
    least, _ = choices.loads(lambda process: process, lambda reader, holders: holders)
    assert report.lower_bound_bytes <= least <= report.busiest_bytes
    assert report.busiest_bytes == max(sent.values(), default=0)
    assert (report.busiest_node_bytes, report.node_lower_bound_bytes) == (report.busiest_bytes,
                                                                          report.lower_bound_bytes)


@settings(max_examples=80)
@given(small_choices())
def test_no_choice_among_the_nearest_beats_the_bounds(choices):
    """With nodes a process reads what its node holds from its node, even where that makes a process busier."""
    nodes = {process: process // 2 for process in range(8)}
    report = replace(choices.some, nodes=nodes).plan('balanced').balance
    process, _ = choices.loads(nodes.get, lambda reader, holders: _nearest(nodes, reader, holders))
    _, across = choices.loads(nodes.get, lambda reader, holders: holders)
    assert report.lower_bound_bytes <= process <= report.busiest_bytes
    assert report.node_lower_bound_bytes <= across <= report.busiest_node_bytes


def _nearest(nodes, reader, holders):
    near = [holder for holder in holders if nodes[holder] == nodes[reader]]
    return [reader] if reader in holders else near or holders


# ---------------------------------------------------------------------------------- totals and iteration


@every_policy
@settings(max_examples=30)
@given(models() | contested_models())
def test_totals_are_the_sums_of_segments(policy, some):
    whole = some.plan(policy)
    links, segments = defaultdict(int), 0
    for name, plan in whole.items():
        for segment in plan.segments:
            ends = some.endpoints.source[segment.source_rank], some.endpoints.target[segment.target_rank]
            links[ends] += segment.numel * some.transfers[name].width
            segments += 1
    found = whole.link_bytes()
    ends = list(zip(found.source.tolist(), found.target.tolist()))
    assert ends == sorted(links) and dict(zip(ends, found.numbytes.tolist())) == links
    assert whole.segments == segments
    assert whole.local_bytes() == sum(size for (source, target), size in links.items() if source == target)
    for end, totals in enumerate((whole.sent_bytes(), whole.received_bytes())):
        expected = defaultdict(int)
        for ends, size in links.items():
            if ends[0] != ends[1]:
                expected[ends[end]] += size
        assert totals == expected


@settings(max_examples=30)
@given(models() | contested_models())
def test_iteration_by_link_and_by_process_yields_the_segments_of_the_parameters(some):
    whole = some.plan('local_first_least_loaded')
    links = whole.link_bytes()
    found = defaultdict(list)
    for source, target in zip(links.source.tolist(), links.target.tolist()):
        for name, columns in whole.of_link(source, target):
            found[name] += columns.segments()
    assert {
        name: set(plan.segments)
        for name, plan in whole.items() if plan.segments
    } == {
        name: set(segments)
        for name, segments in found.items()
    }
    assert sum(map(len, found.values())) == whole.segments
    for process in some.processes:
        names = [name for name, _ in whole.of_process(process)]
        assert names == sorted(names)
        for name, columns in whole.of_process(process):
            assert list(columns.segments()) == [
                segment for segment in whole[name].segments
                if process in (some.endpoints.source[segment.source_rank], some.endpoints.target[segment.target_rank])
            ]


def test_tied_weights_have_one_source_and_two_targets():
    source = zero3_partition_map((8, 4), 2)
    transfers = {
        'embed': ParameterTransfer(contiguous_split_map((8, 4), [4, 4], 0), source, torch.float32),
        'lm_head': ParameterTransfer(replicated_map((8, 4), 2), source, torch.float32, source='embed'),
    }
    whole = plan_transfers(transfers, endpoints=TransferEndpoints({0: 0, 1: 1}, {0: 2, 1: 3}))
    assert (whole.source_of('embed'), whole.source_of('lm_head')) == ('embed', 'embed')
    assert whole.received_bytes() == {2: (16 + 32) * 4, 3: (16 + 32) * 4}
    with pytest.raises(KeyError):
        whole.source_of('head')
    assert 'head' not in whole and 3 not in whole


# -------------------------------------------------------------------------------- what it costs to plan


def test_each_distinct_geometry_is_proved_once(monkeypatch):
    calls = defaultdict(int)
    for name in ('prove_source', 'prove_target'):
        original = getattr(model, name)

        def counted(*arguments, name=name, original=original):
            calls[name] += 1
            return original(*arguments)

        monkeypatch.setattr(model, name, counted)
    transfers = {}
    for index in range(40):
        shape = (8, 6) if index % 2 else (12, 6)
        # Rebuilt for every parameter, and every third one under other ids.
        source, target = zero3_partition_map(shape, 4), contiguous_split_map(shape, [shape[0] // 2] * 2, 0)
        if index % 3 == 0:
            source = relabel(source, {rank: 9 - rank for rank in range(4)})
            target = relabel(target, {0: 1, 1: 0})
        transfers[f'layer.{index}'] = ParameterTransfer(target, source, torch.float32)
    endpoints = TransferEndpoints({location: location for location in range(10)}, {0: 1, 1: 2})
    for policy in NAMED:
        for process in (None, 2):
            calls.clear()
            plan_transfers(transfers, endpoints=endpoints, replica_policy=policy, process=process)
            assert calls == {'prove_source': 2, 'prove_target': 2}


def test_totals_make_no_segment_objects(monkeypatch):
    some = replica_model(UNEVEN, 8, 5)

    def refuse(self, *arguments, **named):
        raise AssertionError('a segment object was made')

    monkeypatch.setattr(TransferSegment, '__init__', refuse)
    for policy in NAMED:
        whole = some.plan(policy)
        assert whole.segments == 5 * 64
        assert sum(whole.sent_bytes().values()) == sum(whole.received_bytes().values()) == sum(UNEVEN) * 4 * 2 * 5
        assert whole.local_bytes() == 0
        assert len([columns for _, columns in whole.of_process(8)]) == 5
    with pytest.raises(AssertionError, match='was made'):
        whole['layer.0'].segments[0]


def digest(folder):
    """A digest of plans by all named policies, of a model with names, ids and processes in no order."""
    transfers = {}
    for index in [5, 3, 11, 0, 7]:
        source = zero3_partition_map((6, 10), 4, locations=[[8, 1, 5, 3], [2, 7, 6, 4]])
        transfers[f'layer.{index}'] = ParameterTransfer(contiguous_split_map((6, 10), [4, 3, 3], 1), source,
                                                        torch.float32)
    endpoints = TransferEndpoints({location: location % 5
                                   for location in (7, 3, 8, 1, 2, 6, 5, 4)}, {
                                       2: 9,
                                       0: 5,
                                       1: 0
                                   })
    result = hashlib.sha256()
    for policy in NAMED:
        path = os.path.join(folder, 'plan.npz')
        save_model_plan(plan_transfers(transfers, endpoints=endpoints, replica_policy=policy), path)
        with open(path, 'rb') as file:
            result.update(file.read())
    return result.hexdigest()


@pytest.mark.parametrize('seed', ['0', '4242'])
def test_another_interpreter_makes_the_same_plans(tmp_path, seed):
    program = 'import sys, test_affine_model_plan; print(test_affine_model_plan.digest(sys.argv[1]))'
    environment = {**os.environ, 'PYTHONHASHSEED': seed, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path))}
    found = subprocess.run([sys.executable, '-c', program, str(tmp_path)],
                           env=environment,
                           cwd=os.path.dirname(__file__),
                           capture_output=True,
                           text=True,
                           timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == digest(tmp_path)


# ----------------------------------------------------------------------------------------------- refusals

GOOD = ParameterTransfer(contiguous_split_map((4, 4), [2, 2], 0), replicated_map((4, 4), 2), torch.float32)
PLACES = TransferEndpoints({0: 0, 1: 1}, {0: 2, 1: 3})


@every_policy
@pytest.mark.parametrize('transfers, error', [
    ([('weight', GOOD)], TypeError),
    (None, TypeError),
    ({
        'weight': GOOD.target_map
    }, TypeError),
    ({
        'weight': GOOD,
        'bias': (GOOD.target_map, GOOD.source_map)
    }, TypeError),
    ({
        'weight': GOOD,
        7: GOOD
    }, TypeError),
    ({
        'weight': GOOD,
        'tied': replace(GOOD, source=0)
    }, TypeError),
])
def test_what_is_no_model_is_refused(policy, transfers, error):
    with pytest.raises(error):
        plan_transfers(transfers, endpoints=PLACES, replica_policy=policy)


@pytest.mark.parametrize('arguments, error', [
    ({
        'target_map': None
    }, TypeError),
    ({
        'source_map': {}
    }, TypeError),
    ({
        'source_dtype': 4
    }, AffineTransferError),
    ({
        'source_dtype': None
    }, AffineTransferError),
    ({
        'target_dtype': 'float32'
    }, AffineTransferError),
])
def test_what_is_no_parameter_is_refused(arguments, error):
    with pytest.raises(error):
        replace(GOOD, **arguments)


@pytest.mark.parametrize('options', [
    {
        'replica_policy': 'nearest'
    },
    {
        'replica_policy': None
    },
    {
        'endpoints': None
    },
    {
        'endpoints': {
            0: 0
        }
    },
    {
        'nodes': {
            0: 0,
            1: 0,
            2: 0
        }
    },
    {
        'nodes': {
            0: 0,
            1: 0,
            2: 0,
            3: 'node'
        }
    },
    {
        'nodes': {
            0: 0,
            1: 0,
            2: 0,
            3: -1
        }
    },
    {
        'nodes': {
            0: 0.0,
            1: 0,
            2: 0,
            3: 0
        }
    },
],
                         ids=str)
def test_policies_refuse_what_they_cannot_use(options):
    with pytest.raises(InvalidReplicaPolicyError):
        plan_transfers({'weight': GOOD}, **{'endpoints': PLACES, **options})


@every_policy
@pytest.mark.parametrize('process', [-1, '0', 1.0, True])
def test_what_is_no_process_is_refused(policy, process):
    with pytest.raises(AffineTransferError, match='process'):
        plan_transfers({'weight': GOOD}, endpoints=PLACES, replica_policy=policy, process=process)


def test_limits_and_nodes_of_a_wrong_type_are_refused():
    with pytest.raises(TypeError):
        plan_transfers({'weight': GOOD}, endpoints=PLACES, limits=3)
    with pytest.raises(TypeError):
        plan_transfers({'weight': GOOD}, endpoints=PLACES, nodes=[0, 0, 1, 1])


def _with_a_gap():
    return ParamAffineMap((4, 4), {0: (2, 4)}, {0: [AffinePiece((2, 4), 0, (4, 1), 0, (4, 1), [0])]})


def _with_too_few_strides():
    return ParamAffineMap((4, 4), {0: (4, 4)}, {0: [AffinePiece((4, 4), 0, (4, ), 0, (4, 1), [0])]})


BAD = {
    'other shapes': ({
        'source_map': replicated_map((4, 5), 2)
    }, InvalidMapError),
    'a gap in the source': ({
        'source_map': _with_a_gap()
    }, InvalidMapError),
    'a gap in the target': ({
        'target_map': _with_a_gap()
    }, InvalidMapError),
    'too few strides': ({
        'source_map': _with_too_few_strides()
    }, InvalidMapError),
    'no place in the source': ({
        'source_map': replicated_map((4, 4), 3)
    }, AffineTransferError),
    'no place in the target': ({
        'target_map': replicated_map((4, 4), 3)
    }, AffineTransferError),
    'another scale': ({
        'source_map': replicated_map((4, 4), 2, 0.5)
    }, UnsupportedLayoutError),
}


@every_policy
@pytest.mark.parametrize('change, error', BAD.values(), ids=BAD)
def test_an_error_names_the_parameter(policy, change, error):
    transfers = {'a.good': GOOD, 'b.bad': replace(GOOD, **change), 'c.good': GOOD}
    with pytest.raises(error, match="'b.bad'"):
        plan_transfers(transfers, endpoints=PLACES, replica_policy=policy)


@every_policy
@pytest.mark.parametrize('limits', [PlanBudget(max_segments=1), PlanBudget(max_pair_checks=1)], ids=str)
def test_a_budget_that_is_exhausted_names_the_parameter(policy, limits):
    with pytest.raises(AffineTransferError, match="'weight'.*max_"):
        plan_transfers({'weight': GOOD}, endpoints=PLACES, replica_policy=policy, limits=limits)


def test_a_callable_that_names_no_holder_is_refused_with_the_parameter():
    with pytest.raises(InvalidReplicaPolicyError, match="'weight'"):
        plan_transfers({'weight': GOOD}, endpoints=PLACES, replica_policy=lambda request: 9)


@pytest.mark.parametrize('change', [{'source_map': zero3_partition_map((8, 4), 4)}, {'source_dtype': torch.bfloat16}])
def test_tied_weights_that_describe_their_source_differently_are_refused(change):
    entry = ParameterTransfer(replicated_map((8, 4), 2), zero3_partition_map((8, 4), 3), torch.float32)
    transfers = {'embed': entry, 'head': replace(entry, source='embed', **change)}
    endpoints = TransferEndpoints({rank: rank for rank in range(4)}, {0: 4, 1: 5})
    with pytest.raises(AffineTransferError, match="'embed' and 'head' both read the source 'embed'"):
        plan_transfers(transfers, endpoints=endpoints)


def _rows_with_factors(factors, order):
    """Rows of four, held by every location: row r by ``factors[location][r]``, as row ``order[r]`` of its shard."""
    ranks, rows = range(len(factors)), range(len(order))
    piece = partial(AffinePiece, (1, 4))
    return ParamAffineMap(
        (len(rows), 4), {rank: (len(rows), 4)
                         for rank in ranks},
        {
            rank: [piece(4 * row, (4, 1), 4 * order[row], (4, 1), ranks, scale=factors[rank][row]) for row in rows]
            for rank in ranks
        })


@pytest.mark.parametrize('scale_power', [None, 1])
@pytest.mark.parametrize('factors, order, wanted', [
    ([[1, 1, 1], [1, 1, 1], [1, 2, 1]], [1, 0, 2], [1, 1, 1]),
    ([[1, 1], [1, 1], [1, 2]], [0, 1], [1, 1]),
    ([[2, 1], [1, 1], [1, 1]], [0, 1], [1, 1]),
    ([[1, 2], [2, 1], [1, 1]], [0, 1], [1, 1]),
    ([[1, 1], [2, 2]], [0, 1], [1, 2]),
])
def test_holders_that_differ_in_scale_by_region_are_dealt_out_region_by_region(factors, order, wanted, scale_power):
    """Regions of one holder set offer different candidates where a target wants the factor that only some have."""
    source, target = _rows_with_factors(factors, order), _rows_with_factors([wanted], range(len(wanted)))
    endpoints = TransferEndpoints({rank: 1 + rank for rank in range(len(factors))}, {0: 0})
    transfers = {
        f'p{place}': ParameterTransfer(target, source, torch.float32, scale_power=scale_power)
        for place in range(6)
    }
    for policy in ('balanced', 'local_first_least_loaded'):
        whole = plan_transfers(transfers, endpoints=endpoints, replica_policy=policy)
        for plan in whole.values():
            prove(plan, target, source)
        for process in range(1 + len(factors)):
            own = plan_transfers(transfers, endpoints=endpoints, replica_policy=policy, process=process)
            assert {name: tuple(columns.segments()) for name, columns in whole.of_process(process)} == \
                {name: tuple(plan.segments) for name, plan in own.items() if len(plan.segments)}
        if policy == 'balanced':
            assert whole.balance.busiest_bytes == max(whole.sent_bytes().values())
            assert whole.balance.lower_bound_bytes <= whole.balance.busiest_bytes


@pytest.mark.parametrize('change, error', [({
    'source_dtype': SimpleNamespace(itemsize=0)
}, AffineTransferError), ({
    'source_dtype': SimpleNamespace(itemsize=-4)
}, AffineTransferError), ({
    'source_dtype': SimpleNamespace(itemsize=10**30)
}, AffineTransferError), ({
    'scale_power': '1'
}, TypeError), ({
    'partial_targets': 'no'
}, TypeError)])
def test_options_that_mean_nothing_are_refused(change, error):
    with pytest.raises(error, match='itemsize|scale_power|partial_targets'):
        replace(ParameterTransfer(replicated_map((4, ), 1), replicated_map((4, ), 1), torch.float32), **change)


def test_a_model_beyond_what_sums_hold_is_refused():
    huge = ParameterTransfer(replicated_map((2**58, ), 1), zero3_partition_map((2**58, ), 2), torch.float32)
    endpoints = TransferEndpoints({0: 0, 1: 1}, {0: 2})
    assert plan_transfers({'p': huge}, endpoints=endpoints).received_bytes() == {2: 2**60}
    with pytest.raises(AffineTransferError, match='more than 2\\*\\*62'):
        plan_transfers({f'p{place}': huge for place in range(40)}, endpoints=endpoints)


def test_nodes_beyond_what_distances_hold_are_refused():
    entry = ParameterTransfer(replicated_map((4, ), 2), replicated_map((4, ), 2), torch.float32)
    with pytest.raises(InvalidReplicaPolicyError, match='2\\*\\*31'):
        plan_transfers({'p': entry}, endpoints=TransferEndpoints({0: 0, 1: 1}, {0: 2, 1: 3}), nodes={0: 2**63 - 1})
