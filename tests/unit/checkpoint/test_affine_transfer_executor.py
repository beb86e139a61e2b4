# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Transfers between real processes over gloo: exact bits, one agreement, and failures that end."""

import os
import re
import signal
import socket
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from affine_plans import (DTYPES, element_plan, matrix_plan, matrix_source, matrix_target, plan_of, same_bits, values)
from affine_processes import run_processes
from deepspeed.checkpoint.affine import (AffinePiece, ParamAffineMap, contiguous_split_map, union_affine_maps,
                                         zero3_partition_map)
from deepspeed.checkpoint.affine_transfer import TransferEndpoints, TransferSegment, plan_transfer
from deepspeed.checkpoint.affine_transfer_executor import (AffineTransferExecutionError, StagingBudget,
                                                           TransferRequest, apply_plan, execute_transfer,
                                                           execute_transfers, join_transfer_group)
from deepspeed.checkpoint.affine_transfer_executor.batch import Batch
from deepspeed.checkpoint.affine_transfer_executor.copies import parts_of
from deepspeed.checkpoint.affine_transfer_executor.links import link_hashes, rounds_of
from deepspeed.checkpoint.affine_transfer_executor.options import Options
from deepspeed.checkpoint.affine_transfer_executor.prepare import prepare

# Rows on processes 0 and 1, columns on processes 2 and 3.
APART = TransferEndpoints({0: 0, 1: 1}, {0: 2, 1: 3})
# Both layouts on the same two processes.
TOGETHER = TransferEndpoints({0: 0, 1: 1}, {0: 0, 1: 1})


def owned(locations, make):
    return {location: make(location) for location in locations}


def move_matrix(world, full, endpoints, group=None, plan=None, target_dtype=None, **options):
    """Rows to columns; returns the stats and whether this process's columns are exact."""
    parts = len(endpoints.source), len(endpoints.target)
    plan = plan or matrix_plan(*full.shape, *parts)
    wanted = full if target_dtype is None else full.to(target_dtype)
    sources = owned(endpoints.source_locations(world.rank), lambda part: matrix_source(full, parts[0], part))
    targets = owned(endpoints.target_locations(world.rank),
                    lambda part: torch.zeros_like(matrix_target(wanted, parts[1], part)))
    stats = execute_transfer(plan,
                             sources,
                             targets,
                             endpoints,
                             full.dtype,
                             group=group,
                             target_dtype=target_dtype,
                             **options)
    exact = all(same_bits(target, matrix_target(wanted, parts[1], part)) for part, target in targets.items())
    return stats, exact


def every_dtype(world):
    world.init_default_group()
    for seed, dtype in enumerate(DTYPES):
        full = values(9 * 7, dtype, seed).view(9, 7)
        stats, exact = move_matrix(world, full, APART, budget=StagingBudget(bytes_per_peer=48))
        assert exact, dtype
        assert stats.sent_bytes + stats.received_bytes > 0 and stats.local_copy_bytes == 0
        assert stats.peak_staging_bytes <= 2 * 2 * 48
    return stats


def test_every_dtype_arrives_bit_for_bit_in_many_rounds():
    stats = run_processes(4, every_dtype)
    assert sum(one.sent_bytes for one in stats) == 63 == sum(one.received_bytes for one in stats)
    assert len({one.rounds for one in stats}) == 1


def one_and_the_same_for_any_budget(world):
    world.init_default_group()
    full = values(13 * 11, torch.float32).view(13, 11)
    rounds = []
    for limit in (4, 5, 12, 100, 1 << 20):
        stats, exact = move_matrix(world, full, TOGETHER, budget=StagingBudget(bytes_per_peer=limit))
        assert exact and stats.peak_staging_bytes <= 2 * 2 * limit
        rounds.append(stats.rounds)
    return rounds


def test_the_staging_budget_cuts_messages_and_changes_no_value():
    rounds = run_processes(2, one_and_the_same_for_any_budget)
    # The larger message: 7 rows of 5 columns, or 6 of 6, both ways; 4 bytes an element.
    assert rounds == [[36, 36, 12, 2, 1]] * 2


def views_of_any_kind(world):
    world.init_default_group()
    full = values(12 * 10, torch.float32).view(12, 10)
    endpoints = TransferEndpoints({0: 0, 1: 1}, {0: 1, 1: 0, 2: 0})
    plan = matrix_plan(12, 10, 2, 3)
    rows = matrix_source(full, 2, world.rank)
    sources = {
        # A transposed view, and a view into the middle of a larger allocation with gaps in its rows.
        0: rows.t().contiguous().t(),
        1: torch.full((9, 14), -1.0)[2:8, 3:13],
    }
    sources[1].copy_(rows)
    whole = {location: torch.full((40, 9), -1.0) for location in (0, 1, 2)}
    targets = {
        0: whole[0][1:25:2, 2:6],
        1: whole[1].view(-1)[5:53],
        2: torch.full((2, 12), -1.0).t(),
    }
    mine = endpoints.target_locations(world.rank)
    execute_transfer(plan, {world.rank: sources[world.rank]}, {location: targets[location]
                                                               for location in mine}, endpoints, torch.float32,
                     StagingBudget(bytes_per_peer=64))
    for location in mine:
        assert same_bits(targets[location].reshape(-1), matrix_target(full, 3, location).reshape(-1)), location
    return [int((whole[location] != -1).sum()) for location in mine if location != 2]


def test_strided_offset_and_transposed_views_are_read_and_written_in_place():
    # Only the views' own elements changed: random bits are never -1.
    assert run_processes(2, views_of_any_kind) == [[48], [48]]


def flat_into_views(world):
    world.init_default_group()
    numel, cut = 60, 23
    plan = element_plan(numel, {0: range(0, cut), 1: range(cut, numel)}, {0: range(numel), 1: range(numel)})
    full = values(numel, torch.bfloat16)
    source = full[:cut] if world.rank == 0 else full[cut:]
    target = torch.zeros(6, 25, dtype=torch.bfloat16)[:, 7:17] if world.rank == 0 else torch.zeros(
        10, 6, dtype=torch.bfloat16).t()
    execute_transfer(plan, {world.rank: source}, {world.rank: target}, TOGETHER, torch.bfloat16,
                     StagingBudget(bytes_per_peer=22))
    return same_bits(target.reshape(-1), full)


def test_flat_runs_that_wrap_through_the_rows_of_a_view():
    assert run_processes(2, flat_into_views) == [True, True]


def several_locations(world):
    world.init_default_group()
    # Seven source parts of 5 rows: the last two are empty. Process 2 owns no source and process 0 no target.
    endpoints = TransferEndpoints({0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 0, 6: 1}, {0: 1, 1: 2, 2: 1, 3: 2})
    return move_matrix(world, values(5 * 3, torch.int16).view(5, 3), endpoints)


def test_several_locations_on_a_process_and_empty_shards():
    results = run_processes(3, several_locations)
    assert all(exact for _, exact in results)
    stats = [one for one, _ in results]
    # Process 1 keeps what it holds of its own columns; process 2 only receives.
    assert stats[0].local_copy_bytes == 0 and stats[1].local_copy_bytes == 8 and stats[2].sent_bytes == 0


def bare_process(world):
    world.init_default_group()
    shards = {0: torch.arange(4.)} if world.rank == 0 else {}
    targets = {0: torch.zeros(4)} if world.rank == 1 else {}
    endpoints = TransferEndpoints({0: 0}, {0: 1, 1: 2})
    execute_transfer(element_plan(4, {0: range(4)}, {0: range(4), 1: []}), shards, targets, endpoints, torch.float32)
    return [target.tolist() for target in targets.values()]


def test_a_process_without_buffers_takes_part():
    assert run_processes(3, bare_process) == [[], [[0, 1, 2, 3]], []]


def local_only(world):
    world.init_default_group()
    plan = element_plan(8, {0: range(4), 1: range(4, 8)}, {0: [3, 2, 1, 0], 1: range(4, 8)})
    shard = torch.arange(4.) + 4 * world.rank
    # The second location copies its region onto itself.
    target = torch.zeros(4) if world.rank == 0 else shard
    stats = execute_transfer(plan, {world.rank: shard}, {world.rank: target}, TOGETHER, torch.float32)
    return target.tolist(), stats.rounds, stats.chunks, stats.sent_bytes, stats.local_copy_bytes, stats.in_place_bytes


def test_what_stays_on_a_process_makes_no_message():
    assert run_processes(2, local_only) == [([3, 2, 1, 0], 0, 0, 0, 16, 0), ([4, 5, 6, 7], 0, 0, 0, 0, 16)]


def batch_of_dtypes(world):
    world.init_default_group()
    requests, checks = [], []
    kinds = ((torch.float32, torch.bfloat16, (3.0, 0.7)), (torch.uint8, None, (1.0, 1.0)),
             (torch.float64, None, (1.0, 1.0)), (torch.bfloat16, torch.float32, (1.0, 4.0)), (torch.bool, None, (1.0,
                                                                                                                 1.0)))
    for index, (dtype, target_dtype, scales) in enumerate(kinds):
        full = values(5 * 6, dtype, index).view(5, 6)
        if dtype.is_floating_point:
            full = torch.randn(5, 6, generator=torch.Generator().manual_seed(index)).to(dtype)
        expected = full / scales[0] if scales[0] != 1.0 else full
        expected = expected * scales[1] if scales[1] != 1.0 else expected
        expected = matrix_target(expected.to(target_dtype or dtype), 2, world.rank)
        target = torch.zeros_like(expected)
        source = matrix_source(full, 2, world.rank)
        requests.append(
            TransferRequest(matrix_plan(5, 6, 2, 2, scales), {world.rank: source}, {world.rank: target},
                            name=f'w{index}',
                            dtype=dtype,
                            target_dtype=target_dtype))
        checks.append((target, expected))
    stats = execute_transfers(requests, TOGETHER, torch.float32, StagingBudget(bytes_per_peer=37))
    return [same_bits(target, expected) for target, expected in checks], stats.sent_bytes


def test_a_batch_of_dtypes_casts_and_scales_in_shared_messages():
    results = run_processes(2, batch_of_dtypes)
    assert [exact for exact, _ in results] == [[True] * 5] * 2
    # Process 0 sends 3 rows of 3 columns, process 1 two rows; 2, 1, 8, 4 and 1 bytes an element.
    assert [sent for _, sent in results] == [9 * 16, 6 * 16]


def cast_of_a_shard(world):
    world.init_default_group()
    full = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))
    return move_matrix(world, full, TOGETHER, target_dtype=torch.bfloat16)


def test_values_are_cast_before_they_are_sent():
    results = run_processes(2, cast_of_a_shard)
    assert all(exact for _, exact in results)
    assert [stats.sent_bytes for stats, _ in results] == [3 * 2 * 2, 3 * 3 * 2]


# Layouts, planned


def union_on_two_processes(world):
    """ZeRO-3 partitions of 0 and 1, and a column shard that survived on process 1 beside its partition."""
    world.init_default_group()
    shape = (7, 6)
    full = values(42, torch.bfloat16).view(shape)
    columns = contiguous_split_map(shape, [2, 4], 1)
    zero3 = zero3_partition_map(shape, 2, locations=[10, 11])
    survivors = ParamAffineMap(shape, {1: columns.shard_shapes[1]}, {1: [held_by(columns.pieces_by_rank[1], {1})]})
    source = union_affine_maps([zero3, survivors])
    endpoints = TransferEndpoints({10: 0, 11: 1, 1: 1}, {0: 0, 1: 1})
    plan = plan_transfer(columns, source, replica_policy='local_first_least_loaded', endpoints=endpoints)
    shard = columns.extract(full, world.rank)
    sources = {10: full.reshape(-1)[:21]} if world.rank == 0 else {11: full.reshape(-1)[21:], 1: shard}
    # The surviving shard is also the target: it stays where it is.
    target = torch.zeros_like(shard) if world.rank == 0 else shard
    stats = execute_transfer(plan, sources, {world.rank: target}, endpoints, torch.bfloat16)
    return same_bits(target, columns.extract(full, world.rank)), stats


def held_by(pieces, holders):
    piece, = pieces
    return AffinePiece(piece.shape, piece.source_offset, piece.source_strides, piece.dest_offset, piece.dest_strides,
                       holders)


def test_a_union_of_partitions_and_a_surviving_shard_runs_on_two_processes():
    (first, sender), (second, keeper) = run_processes(2, union_on_two_processes)
    assert first and second
    # Process 1 moves nothing to itself: its shard is already there. It sends what it alone has of the first columns.
    assert (keeper.received_bytes, keeper.local_copy_bytes, keeper.in_place_bytes) == (0, 0, 7 * 4 * 2)
    assert keeper.sent_bytes == sender.received_bytes == 7 * 2 * 2 - sender.local_copy_bytes


# Groups


def joint_of_two_worlds(world):
    job = world.rank // 2
    world.init_default_group(f'job {job}', rank=world.rank % 2, size=2)
    full = values(9 * 8, torch.float32).view(9, 8)
    with join_transfer_group(world.store('joint'), world.rank, 4, timeout=60) as group:
        assert (group.rank(), group.size()) == (world.rank, 4)
        results = [move_matrix(world, full, APART, group) for _ in range(2)]
    # The job's own group is untouched, before and after.
    mine = torch.tensor([job])
    dist.all_reduce(mine)
    with pytest.raises(AffineTransferExecutionError, match='closed'):
        move_matrix(world, full, APART, group)
    return [exact for _, exact in results], mine.item(), dist.get_world_size()


def test_two_worlds_of_two_meet_in_a_joint_group():
    assert run_processes(4, joint_of_two_worlds) == [([True, True], 2 * job, 2) for job in (0, 0, 1, 1)]


def joint_by_address(world, address):
    full = values(4 * 4, torch.float32).view(4, 4)
    group = join_transfer_group(address, world.rank, 2, timeout=60)
    _, exact = move_matrix(world, full, TOGETHER, group)
    # The last to leave is the one whose store server the other may still ask.
    world.store('leave').set(f'{world.rank}', 'done')
    world.store('leave').wait(['0', '1'])
    group.close()
    group.close()
    return exact, dist.is_initialized()


def test_an_address_is_all_that_processes_without_a_default_group_need():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    assert run_processes(2, joint_by_address, f'tcp://127.0.0.1:{port}') == [(True, False)] * 2


def subgroup(world):
    world.init_default_group()
    group = dist.new_group([3, 1])
    if world.rank not in (1, 3):
        with pytest.raises(AffineTransferExecutionError, match='not in the group'):
            execute_transfer(matrix_plan(4, 4, 2, 2), {}, {}, TOGETHER, torch.float32, group=group)
        return True
    # Endpoint processes are ranks within the group, whatever the processes are called elsewhere.
    rank = dist.get_rank(group)
    full = values(16, torch.float32).view(4, 4)
    target = torch.zeros(4, 2)
    execute_transfer(matrix_plan(4, 4, 2, 2), {rank: matrix_source(full, 2, rank)}, {rank: target},
                     TOGETHER,
                     torch.float32,
                     group=group)
    return same_bits(target, matrix_target(full, 2, rank))


def test_processes_are_ranks_within_the_group():
    assert run_processes(4, subgroup) == [True] * 4


def raw_backend(world):
    from datetime import timedelta
    backend = dist.ProcessGroupGloo(world.store('raw'), world.rank, world.size, timedelta(seconds=60))
    return move_matrix(world, values(16, torch.float32).view(4, 4), TOGETHER, backend)[1]


def test_a_backend_without_a_known_store_will_do():
    assert run_processes(2, raw_backend) == [True, True]


def join_with_one_missing(world):
    if world.rank == 2:
        return ''
    with pytest.raises(AffineTransferExecutionError) as refusal:
        join_transfer_group(world.store('joint'), world.rank, 3, timeout=1)
    return str(refusal.value)


def test_joining_names_those_who_did_not_come():
    first, second, _ = run_processes(3, join_with_one_missing)
    # On a slow machine one of the two may miss the other as well.
    assert re.search(r'process 0 waited 1 seconds for processes \[(1, )?2\]', first)
    assert re.search(r'process 1 waited 1 seconds for processes \[(0, )?2\]', second)


def join_as_the_same(world):
    if world.rank == 1:
        world.store('turn').wait(['first'])
        with pytest.raises(AffineTransferExecutionError, match='another process has joined.* as process 0'):
            join_transfer_group(world.store('joint'), 0, 1)
        return True
    join_transfer_group(world.store('joint'), 0, 1)
    world.store('turn').set('first', 'joined')
    return True


def test_a_rank_is_joined_once():
    assert run_processes(2, join_as_the_same) == [True, True]


@pytest.mark.parametrize('arguments, match', [
    (('127.0.0.1', 0, 1), 'host:port'),
    (('127.0.0.1:0', 0, 1), 'host:port'),
    ((5, 0, 1), 'address is a int'),
    (('127.0.0.1:1', 2, 2), 'rank 2 of 2'),
    (('127.0.0.1:1', -1, 2), 'rank -1 of 2'),
    (('127.0.0.1:1', 0, 2**40), 'rank 0 of 1099511627776'),
    (('h:\u00b2', 1, 2), 'host:port'),
    (('h:\u0663', 1, 2), 'host:port'),
    (('h:' + '1' * 5000, 1, 2), 'host:port'),
    (('\udc80:29500', 1, 2), 'process 1 waited .* at .*udc80'),
])
def test_bad_arguments_of_joining(arguments, match):
    with pytest.raises(AffineTransferExecutionError, match=match):
        join_transfer_group(*arguments)


@pytest.mark.parametrize('timeout', [0, -1.0, float('nan'), float('inf'), 1e10, 10**400, '5', None, True])
def test_a_timeout_is_a_number_of_seconds(timeout):
    with pytest.raises(AffineTransferExecutionError,
                       match='timeout is .*; expected a positive number of seconds, at '
                       'most 1000000'):
        join_transfer_group('127.0.0.1:1', 0, 1, timeout=timeout)


@pytest.mark.parametrize('name', [5, '\ud800', 'a\0b'])
def test_the_name_of_a_group_can_be_a_key(name):
    with pytest.raises(AffineTransferExecutionError, match='name is'):
        join_transfer_group('127.0.0.1:1', 0, 1, name=name)


def in_time(call):
    """What the call raised; it must end although what it waits for never comes."""
    found = []

    def run():
        with pytest.raises(AffineTransferExecutionError) as refusal:
            call()
        found.append(str(refusal.value))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert found, 'still waiting'
    return found[0]


def test_joining_ends_where_something_listens_and_never_answers():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        listener.listen()
        address = f'127.0.0.1:{listener.getsockname()[1]}'
        words = in_time(lambda: join_transfer_group(address, 1, 2, timeout=0.5))
    assert re.search(r'process 1 waited \d+\.\d seconds for process 0, in vain, at ', words)


class SilentStore(dist.Store):
    """A store whose server has stopped answering."""

    def add(self, key, value):
        threading.Event().wait()


def test_joining_ends_where_the_store_never_answers():
    words = in_time(lambda: join_transfer_group(SilentStore(), 1, 2, timeout=0.5))
    assert 'process 1 waited 0.5 seconds for others to join the transfer group of 2' in words


def join_as(world, ranks, sizes):
    with pytest.raises(AffineTransferExecutionError) as refusal:
        join_transfer_group(world.store('joint'), ranks[world.rank], sizes[world.rank], timeout=60)
    return str(refusal.value)


@pytest.mark.parametrize('ranks, sizes', [((0, 1), (2, 3)), ((1, 2), (2, 3)), ((0, 2), (2, 3)), ((0, 1), (3, 2))])
def test_processes_of_different_sizes_hear_of_each_other(ranks, sizes):
    for words in run_processes(2, join_as, ranks, sizes):
        assert all(f'process {rank} of {size} (pid ' in words for rank, size in zip(ranks, sizes)), words
        assert 'different sizes' in words and 'seconds' not in words


def test_two_processes_of_one_rank_hear_of_each_other():
    words = run_processes(2, join_as, (0, 0), (2, 2))
    for text in words:
        assert 'another process has joined this transfer group as process 0' in text
        assert len(set(re.findall(r'process 0 of 2 \(pid (\d+) on ', text))) == 2


def sizes_over_an_address(world, address):
    with pytest.raises(AffineTransferExecutionError, match='different sizes') as refusal:
        join_transfer_group(address, world.rank, world.rank + 2, timeout=60)
    return str(refusal.value)


def test_the_store_outlives_the_words_that_are_in_it():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    first, second = run_processes(2, sizes_over_an_address, f'127.0.0.1:{port}')
    assert first.partition(': ')[2] == second.partition(': ')[2]


@pytest.mark.parametrize('group', ['nonsense', 5, torch.zeros(2), object()])
def test_what_is_no_group_is_refused_by_its_type(group):
    with pytest.raises(AffineTransferExecutionError, match=f'group is a {type(group).__name__}; expected a torch'):
        execute_transfer(matrix_plan(2, 2, 1, 1), {}, {}, TOGETHER, torch.float32, group=group)


def test_without_any_group_the_error_says_what_to_do():
    with pytest.raises(AffineTransferExecutionError, match='join_transfer_group, or use apply_plan'):
        execute_transfer(matrix_plan(2, 2, 1, 1), {}, {}, TOGETHER, torch.float32)


# Refusals


def refused(world,
            full,
            plan=None,
            endpoints=TOGETHER,
            dtype=torch.float32,
            budget=StagingBudget(),
            change=None,
            name='w',
            timeout=60):
    """The words of the refusal, after checking that targets did not change and that the group still works."""
    sources, targets = {world.rank: matrix_source(full, 2, world.rank)}, {world.rank: torch.full((6, 3), -1.0)}
    if change is not None:
        change(sources, targets)
    before = {location: target.clone() for location, target in targets.items()}
    with pytest.raises(AffineTransferExecutionError) as refusal:
        execute_transfer(plan or matrix_plan(6, 6, 2, 2),
                         sources,
                         targets,
                         endpoints,
                         dtype,
                         budget,
                         name=name,
                         timeout=timeout)
    assert all(torch.equal(targets[location], before[location]) for location in targets)
    assert move_matrix(world, full, TOGETHER)[1]
    return str(refusal.value)


class Wordless(Exception):
    """An exception without a text."""

    def __str__(self):
        raise RuntimeError('no words')


class Raising(dict):
    """Buffers which raise when they are asked for one."""

    def __init__(self, buffers, error):
        super().__init__(buffers)
        self.error = error

    def __contains__(self, location):
        raise self.error


def refused_for_odd_words(world, full, error):
    """The refusal where process 1's sources raise ``error``, or are None; the group still works."""
    sources = {world.rank: matrix_source(full, 2, world.rank)}
    if world.rank == 1:
        sources = None if error is None else Raising(sources, error)
    target = torch.full((6, 3), -1.0)
    with pytest.raises(AffineTransferExecutionError) as refusal:
        execute_transfer(matrix_plan(6, 6, 2, 2),
                         sources, {world.rank: target},
                         TOGETHER,
                         torch.float32,
                         name='w',
                         timeout=60)
    assert bool((target == -1).all()) and move_matrix(world, full, TOGETHER)[1]
    return str(refusal.value)


def each_refusal(world):
    world.init_default_group()
    full = values(36, torch.float32).view(6, 6)
    odd = world.rank == 1
    words = {}
    words['plan'] = refused(world,
                            full,
                            plan=element_plan(36, {
                                0: range(18),
                                1: range(18, 36)
                            }, {
                                0: range(18),
                                1: range(18, 36)
                            }) if odd else None)
    words['endpoints'] = refused(world,
                                 full,
                                 endpoints=TransferEndpoints({
                                     0: 0,
                                     1: 1,
                                     2: 0
                                 }, {
                                     0: 0,
                                     1: 1
                                 }) if odd else TOGETHER)
    words['budget'] = refused(world, full, budget=StagingBudget(64) if odd else StagingBudget())
    words['name'] = refused(world, full, name='v' if odd else 'w')

    def cut_short(sources, targets):
        if odd:
            sources[1] = sources[1].view(-1)[:-1]

    def other_dtype(sources, targets):
        if odd:
            targets[1] = targets[1].double()

    def nothing(sources, targets):
        if odd:
            sources.clear()

    words['short'] = refused(world, full, change=cut_short)
    words['tensor dtype'] = refused(world, full, change=other_dtype)
    words['missing'] = refused(world, full, change=nothing)
    words['said dtype'] = refused(world, full, dtype=torch.bfloat16 if odd else torch.float32)
    words['no plan'] = refused(world, full, plan='a plan' if odd else None)
    words['empty plan'] = refused(world, full, plan=plan_of([], (6, 6), {}, {}))
    for timeout in (float('nan'), '5', 1e10, 1e15, float('inf')):
        words[f'timeout {timeout}'] = refused(world, full, timeout=timeout if odd else 60)

    def odd_location(sources, targets):
        if odd:
            sources['q'] = sources[1]

    words['buffer name'] = refused(world, full, change=odd_location)
    words['surrogate'] = refused_for_odd_words(world, full, ValueError('bad \ud800 thing'))
    words['no words'] = refused_for_odd_words(world, full, Wordless())
    words['no buffers'] = refused_for_odd_words(world, full, None)
    words['process'] = refused(world, full, endpoints=TransferEndpoints({0: 0, 1: 1}, {0: 0, 1: 2}))
    return words


def test_a_refusal_is_the_same_on_every_process_and_harmless():
    first, second = run_processes(2, each_refusal)
    assert first == second
    for case, name in (('plan', 'plans'), ('endpoints', 'endpoints'), ('budget', 'staging budget'), ('name', 'names')):
        assert 'transfer schedule' in first[case] and 'before it began' in first[case]
        assert f'their {name} differ (process 0 against process 1)' in first[case]
    for case in ('short', 'tensor dtype', 'missing', 'said dtype', 'no plan'):
        assert 'before it began' in first[case] and 'process 1 rejected the transfer batch' in first[case]
        assert 'process 0 rejected' not in first[case]
    assert "'w': source location 1 has a buffer of 17 elements; the plan needs exactly 18" in first['short']
    assert 'target location 1 has a buffer of torch.float64; expected torch.float32' in first['tensor dtype']
    assert 'source location 1 belongs to process 1 and has no buffer' in first['missing']
    assert 'source location 1 has a buffer of torch.float32; expected torch.bfloat16' in first['said dtype']
    assert 'has a str for a plan' in first['no plan']
    for timeout in ('nan', '5', '10000000000.0', '1000000000000000.0', 'inf'):
        assert 'process 1 rejected the transfer batch: timeout is ' in first[f'timeout {timeout}']
    assert "source buffers name the location 'q'; expected an integer" in first['buffer name']
    assert "process 1 rejected the transfer batch: parameter 'w': bad \\ud800 thing" in first['surrogate']
    assert 'process 1 rejected the transfer batch: Wordless: its text cannot be made' in first['no words']
    assert "parameter 'w': source buffers are a NoneType; expected a mapping" in first['no buffers']
    assert 'moves nothing' in first['empty plan'] and 'process 0 rejected' in first['empty plan']
    assert 'target location 1 is on process 2, but the group has 2 processes' in first['process']


def dtype_of_a_bystander(world):
    world.init_default_group()
    # Process 2 owns nothing, so only the agreement can find that it was told another dtype.
    dtype = torch.bfloat16 if world.rank == 2 else torch.float32
    sources = {world.rank: torch.ones(8)} if world.rank < 2 else {}
    targets = {world.rank: torch.zeros(8)} if world.rank < 2 else {}
    with pytest.raises(AffineTransferExecutionError, match='transfer schedule') as refusal:
        execute_transfer(matrix_plan(4, 4, 2, 2), sources, targets, TOGETHER, dtype)
    assert not any(target.any() for target in targets.values())
    return str(refusal.value)


def test_a_dtype_that_only_the_agreement_can_compare():
    words = run_processes(3, dtype_of_a_bystander)
    assert len(set(words)) == 1 and 'their dtypes differ (processes 0, 1 against process 2)' in words[0]


# Failures


def interrupted_before_it_agrees(world):
    world.init_default_group()
    full = values(36, torch.float32).view(6, 6)
    sources = {world.rank: matrix_source(full, 2, world.rank)}
    if world.rank == 1:
        sources = Raising(sources, KeyboardInterrupt('stop \ud800'))
    return broken_before_it_began(world, full, sources)


def interrupted_between_the_exchanges(world):
    world.init_default_group()
    full = values(36, torch.float32).view(6, 6)
    sources = {world.rank: matrix_source(full, 2, world.rank)}
    if world.rank == 1:
        interrupt_the_second_exchange()
    # Refused by all, so that there is a second exchange.
    return broken_before_it_began(world, full, sources, dtype=torch.bfloat16)


def interrupt_the_second_exchange():
    from deepspeed.checkpoint.affine_transfer_executor.channel import Channel
    real, done = Channel.gather, []

    def gather(self, row, timeout):
        done.append(row)
        if len(done) == 2:
            raise KeyboardInterrupt('stop')
        return real(self, row, timeout)

    Channel.gather = gather


def broken_before_it_began(world, full, sources, dtype=torch.float32):
    target = torch.full((6, 3), -1.0)
    with pytest.raises(KeyboardInterrupt if world.rank == 1 else AffineTransferExecutionError) as failure:
        execute_transfer(matrix_plan(6, 6, 2, 2), sources, {world.rank: target}, TOGETHER, dtype, timeout=60)
    with pytest.raises(AffineTransferExecutionError, match='cannot be used any more'):
        move_matrix(world, full, TOGETHER, timeout=60)
    assert bool((target == -1).all())
    return str(failure.value)


@pytest.mark.parametrize('work', [interrupted_before_it_agrees, interrupted_between_the_exchanges])
def test_an_interrupt_before_all_have_agreed_ends_the_group_for_all(work):
    first, _ = run_processes(2, work)
    # Process 0 may come so late that it finds the note before it exchanges anything.
    assert 'before it began' in first and 'process 1 KeyboardInterrupt: stop' in first


def dies_before_it_begins(world):
    world.init_default_group()
    full = values(36, torch.float32).view(6, 6)
    # Both have connected.
    dist.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(AffineTransferExecutionError) as failure:
        move_matrix(world, full, TOGETHER, timeout=100)
    return str(failure.value)


def test_a_peer_that_died_is_not_said_to_have_been_waited_for():
    first, _ = run_processes(2, dies_before_it_begins, may_die={1}, timeout=90)
    assert re.search(r'process 0 lost a connection after \d+\.\d seconds, while process 1 had not begun', first)
    assert '100 seconds' not in first


def killed_while_it_sends(world, big):
    world.init_default_group()
    full = torch.zeros(512, big)
    endpoints = TransferEndpoints({0: 0, 1: 1}, {0: 0, 1: 2})
    if world.rank == 1:
        die_in_round(3)
    with pytest.raises(AffineTransferExecutionError) as failure:
        move_matrix(world, full, endpoints, budget=StagingBudget(bytes_per_peer=4096), name='layers.0.w', timeout=60)
    with pytest.raises(AffineTransferExecutionError, match='cannot be used any more') as again:
        move_matrix(world, full, endpoints, timeout=60)
    return str(failure.value), str(again.value)


def before_each_round(act):
    """Call ``act(number)`` in this process before it posts round ``number``, from 0."""
    from deepspeed.checkpoint.affine_transfer_executor.channel import Channel
    real, posted = Channel.post, []

    def post(self, receives, sends):
        act(len(posted))
        posted.append(sends)
        return real(self, receives, sends)

    Channel.post = post


def die_in_round(number):
    """Have this process killed before it posts the given round."""
    before_each_round(lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == number else None)


def test_a_killed_peer_is_named_with_round_and_parameter():
    results = run_processes(3, killed_while_it_sends, 256, may_die={1})
    assert results[1] is None
    for words, again in (results[0], results[2]):
        assert 'Timed out' not in words and 'nothing came' not in words
        assert 'targets may be partly written' in words and "parameter 'layers.0.w'" in words
        assert 'waited for process 1 (' in words and 'round ' in words
        assert 'before it began' in again and 'Join a new group' in again


def killed_two_hops_away(world):
    world.init_default_group()
    endpoints = TransferEndpoints({0: 2, 1: 1}, {0: 1, 1: 0})
    # Process 1 waits for process 2, which dies, and process 0 waits for process 1.
    plan = element_plan(4096, {0: range(2048), 1: range(2048, 4096)}, {0: range(2048), 1: range(2048, 4096)})
    if world.rank == 2:
        die_in_round(1)
    sources = {endpoints.source_locations(world.rank)[0]: torch.zeros(2048)} if world.rank else {}
    targets = {endpoints.target_locations(world.rank)[0]: torch.zeros(2048)} if world.rank < 2 else {}
    if world.rank == 1:
        wait_before_round_two()
    with pytest.raises(AffineTransferExecutionError) as failure:
        execute_transfer(plan,
                         sources,
                         targets,
                         endpoints,
                         torch.float32,
                         StagingBudget(bytes_per_peer=512),
                         timeout=30,
                         name='w')
    return str(failure.value)


def wait_before_round_two():
    """Let process 1 send nothing more after its first round until its own receive has failed."""
    from deepspeed.checkpoint.affine_transfer_executor.channel import Channel
    real = Channel.post

    def post(self, receives, sends):
        return real(self, receives, [])

    Channel.post = post


def test_who_waits_for_a_survivor_hears_where_it_began():
    first, second, _ = run_processes(3, killed_two_hops_away, may_die={2})
    assert 'waited for process 2 (receive from 2' in second and "parameter 'w'" in second
    assert 'waited for process 1 (receive from 1' in first
    assert 'It began elsewhere: process 1 waited for process 2' in first


def late_to_begin(world):
    world.init_default_group()
    full = values(36, torch.float32).view(6, 6)
    if world.rank == 2:
        world.store('turn').wait(['0', '1'])
    target = torch.full((6, 3), -1.0)
    with pytest.raises(AffineTransferExecutionError) as failure:
        execute_transfer(matrix_plan(6, 6, 2,
                                     2), {world.rank: matrix_source(full, 2, world.rank)} if world.rank < 2 else {},
                         {world.rank: target} if world.rank < 2 else {},
                         TOGETHER,
                         torch.float32,
                         timeout=1)
    world.store('turn').set(str(world.rank), 'gave up')
    return str(failure.value), bool((target == -1).all())


def test_a_peer_that_does_not_begin_in_time_is_named():
    results = run_processes(3, late_to_begin)
    assert all(unchanged for _, unchanged in results)
    # Whoever gives up first says who is missing; on a slow machine that may be more than the one that never came.
    assert any(re.search(r'waited 1 seconds for process(es)? ([01], )?2 to begin', words) for words, _ in results[:2])
    for words, _ in results:
        assert 'before it began' in words and 'process 2' in words and 'new' in words


def late_within_a_round(world):
    world.init_default_group()
    full = values(36, torch.float32).view(6, 6)
    if world.rank == 1:
        stop_before_the_first_round(world.store('turn'))
    with pytest.raises(AffineTransferExecutionError) as failure:
        move_matrix(world, full, TOGETHER, name='embed', timeout=5)
    world.store('turn').set('gave up', 'yes')
    return str(failure.value)


def stop_before_the_first_round(store):
    before_each_round(lambda _: store.wait(['gave up']))


def test_a_peer_that_stops_in_a_round_is_named():
    first, second = run_processes(2, late_within_a_round)
    assert 'process 0 waited for process 1 (receive from 1, round 1 of 1' in first and "parameter 'embed'" in first
    # The late one finds its connections closed, and is told why.
    assert 'It began elsewhere: process 0 waited for process 1' in second


def fails_on_its_own(world):
    world.init_default_group()
    full = values(36, torch.float32).view(6, 6)
    if world.rank == 1:
        fail_in_the_first_round()
    with pytest.raises(AffineTransferExecutionError) as failure:
        move_matrix(world, full, TOGETHER, timeout=60)
    with pytest.raises(AffineTransferExecutionError, match='cannot be used any more'):
        move_matrix(world, full, TOGETHER, timeout=60)
    return str(failure.value)


def fail_in_the_first_round():

    def fail(_):
        raise MemoryError('no room')

    before_each_round(fail)


def test_a_process_that_fails_while_moving_ends_the_group_for_all():
    first, second = run_processes(2, fails_on_its_own)
    assert 'process 1 MemoryError: no room' in second
    assert 'waited for process 1 (' in first and 'It began elsewhere: process 1 MemoryError' in first


def over_a_file(world, path):
    group = join_transfer_group(dist.FileStore(path, world.size), world.rank, world.size, timeout=60)
    full = values(36, torch.float32).view(6, 6)
    return [move_matrix(world, full, TOGETHER, group)[1] for _ in range(2)]


def test_any_store_will_do(tmp_path):
    assert run_processes(2, over_a_file, str(tmp_path / 'store')) == [[True, True]] * 2


# The schedule, without any process


@st.composite
def layouts(draw):
    numel = draw(st.integers(1, 30))
    owners = draw(st.lists(st.integers(0, 3), min_size=numel, max_size=numel))
    sources = {location: [element for element in range(numel) if owners[element] == location] for location in range(4)}
    targets = {
        location: draw(st.lists(st.integers(0, numel - 1), max_size=numel))
        for location in range(draw(st.integers(1, 3)))
    }
    targets[3] = list(range(numel))
    ends = [draw(st.lists(st.integers(0, 2), min_size=4, max_size=4)) for _ in range(2)]
    endpoints = TransferEndpoints(dict(enumerate(ends[0])), dict(enumerate(ends[1])))
    return element_plan(numel, sources, targets), endpoints


def rounds_by_process(plan, endpoints, dtype, budget, multicast, size):
    """What each process has prepared, and its rounds, as compiling would make them."""
    made = []
    for rank in range(size):
        buffers = [{
            location: torch.zeros(numel[location], dtype=dtype)
            for location in locations(rank) if location in numel
        } for locations, numel in ((endpoints.source_locations, plan.source_numel), (endpoints.target_locations,
                                                                                     plan.target_numel))]
        batch = Batch.of_requests([TransferRequest(plan, *buffers)], dtype, None)
        prepared = prepare(batch, endpoints, Options(budget=budget, multicast=multicast), rank, size)
        limit = budget.bytes_per_peer // dtype.itemsize * dtype.itemsize
        made.append((prepared, rounds_of(prepared.links, prepared.moves, budget.direct_bytes, limit)))
    return made


def content(moves, message):
    """What a message carries, so that both ends can be compared."""
    part = moves.take(message.rows)
    columns = (part.source_rank, part.source_offset, part.target_rank, part.target_offset, part.shape)
    return [column.tolist() for column in (*columns, message.first, message.last)] + [message.numbytes]


@settings(max_examples=200, deadline=None)
@given(layouts(), st.sampled_from([torch.uint8, torch.float32, torch.float64]), st.integers(8, 40),
       st.sampled_from([1, 4, 9, 1000]), st.sampled_from(['auto', 'off']), st.sampled_from([2, 3, 64]))
def test_both_ends_of_a_link_expect_the_same_bytes_in_the_same_round(case, dtype, limit, direct, multicast,
                                                                     operations):
    plan, endpoints = case
    budget = StagingBudget(limit, direct_bytes=direct, operations=operations)
    made = rounds_by_process(plan, endpoints, dtype, budget, multicast, 3)
    sent, received = {}, {}
    for rank, (prepared, rounds) in enumerate(made):
        for item in rounds:
            assert 1 <= len(item.sends) + len(item.receives) <= operations
            sent.update({(item.key, rank, message.peer): content(prepared.moves, message) for message in item.sends})
            received.update({
                (item.key, message.peer, rank): content(prepared.moves, message)
                for message in item.receives
            })
            assert all(0 < message.numbytes <= limit for message in item.sends + item.receives)
    assert sent == received
    carried = sum(message[-1] for message in sent.values())
    local = sum(int(prepared.moves.numbytes[prepared.moves.is_local].sum()) for prepared, _ in made)
    assert carried + local == plan.moved_elements * dtype.itemsize
    hashes = [link_hashes(prepared.links, prepared.moves, rank) for rank, (prepared, _) in enumerate(made)]
    for rank, (sends, _) in enumerate(hashes):
        assert all(hashes[peer][1][rank] == value for peer, value in sends.items())


@pytest.mark.parametrize('numbytes', [0, 2**62 + 1, 2**70, 10**400, 1.5, True])
def test_a_staging_budget_is_a_number_of_bytes(numbytes):
    with pytest.raises(AffineTransferExecutionError, match='bytes_per_peer is .*; expected .* at most 2'):
        StagingBudget(numbytes)
    assert StagingBudget(2**62).bytes_per_peer == 2**62


@pytest.mark.parametrize('buffers, match', [
    ((None, None), "parameter 'w': source buffers are a NoneType"),
    (({
        0: torch.zeros(4)
    }, [torch.zeros(4)]), "parameter 'w': target buffers are a list"),
    (({
        0: torch.zeros(4)
    }, {
        'a': torch.zeros(4)
    }), "parameter 'w': target buffers name the location 'a'"),
    (({
        True: torch.zeros(4)
    }, {
        0: torch.zeros(4)
    }), "parameter 'w': source buffers name the location True"),
])
def test_buffers_are_a_mapping_of_locations(buffers, match):
    with pytest.raises(AffineTransferExecutionError, match=match):
        apply_plan(matrix_plan(2, 2, 1, 1), *buffers, name='w')


def test_what_is_no_plan_is_refused_by_its_type():
    with pytest.raises(AffineTransferExecutionError, match='request 0 has a NoneType for a plan'):
        apply_plan(None, {}, {})


def test_segments_of_several_axes_are_cut_where_the_budget_ends():
    segment = TransferSegment(0, 0, (12, 4, 1), 0, 0, (12, 4, 1), (3, 3, 4))
    plan = plan_of([segment], (3, 3, 4), {0: 36}, {0: 36})
    endpoints = TransferEndpoints({0: 0}, {0: 1})
    (prepared, rounds), _ = rounds_by_process(plan, endpoints, torch.float32, StagingBudget(28), 'off', 2)
    found = []
    for item in rounds:
        message, = item.sends
        for part in parts_of(prepared.moves, message.rows, message.first, message.last):
            assert part.source == part.target
            grid = torch.arange(36).as_strided(part.source.shape, part.source.strides, part.source.offset)
            found += grid.reshape(-1).tolist()
    assert found == list(range(36)) and len(rounds) == 6
