# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What users do to buffers, programs and groups that a transfer must notice, or must not mind."""

import os
import signal
import socket

import pytest
import torch

from affine_processes import run_processes
from deepspeed.checkpoint.affine import contiguous_split_map, replicated_map
from deepspeed.checkpoint.affine_transfer import ParameterTransfer, TransferEndpoints, plan_transfer, plan_transfers
from deepspeed.checkpoint.affine_transfer_executor import (AffineTransferExecutionError, TransferBrokenError,
                                                           TransferRequest, compile_transfer, compile_transfers,
                                                           join_transfer_group)

HERE = TransferEndpoints(source={0: 0}, target={0: 0, 1: 0})
ACROSS = TransferEndpoints(source={0: 0}, target={0: 0, 1: 1})
SHAPE = (4, 6)
DTYPE = torch.float32


def rows_plan():
    """Whole at location 0, to two halves of its rows."""
    return plan_transfer(contiguous_split_map(SHAPE, [2, 2], 0), replicated_map(SHAPE, 1))


def halves():
    return {0: torch.zeros(2, 6), 1: torch.zeros(2, 6)}


def full(first=0):
    return torch.arange(first, first + 24, dtype=DTYPE).view(SHAPE)


def local_program(source, targets, **options):
    return compile_transfer(rows_plan(), {0: source}, targets, HERE, DTYPE, **options)


# ---------------------------------------------------------------------------------------------- buffers


@pytest.mark.parametrize('staged', [False, True])
@pytest.mark.parametrize('held', [0, 4])
@pytest.mark.parametrize('side', ['source', 'target'])
def test_memory_that_is_too_small_for_its_tensor_is_refused(side, held, staged):
    """As after offloading, or ``untyped_storage().resize_(0)``."""
    source, targets = full(), halves()
    victim = source if side == 'source' else targets[0]
    victim.untyped_storage().resize_(held)
    with pytest.raises(AffineTransferExecutionError, match=f'{side} location 0: .*storage of {held} bytes'):
        local_program(source, targets, staged=staged)


def test_a_rebind_to_such_memory_keeps_the_program():
    source, targets = full(), halves()
    program = local_program(source, targets)
    freed = halves()
    freed[1].untyped_storage().resize_(0)
    with pytest.raises(AffineTransferExecutionError, match='target location 1: .*storage of 0 bytes'):
        program.rebind(target_buffers=freed)
    program.run()
    assert torch.equal(torch.cat([targets[0], targets[1]]), source)


def test_a_buffer_that_is_transposed_in_place_is_noticed():
    source = full()
    program = local_program(source, halves())
    source.as_strided_((6, 4), (1, 6))
    with pytest.raises(AffineTransferExecutionError, match=r'strides \(6, 1\).*strides \(1, 6\).*rebind'):
        program.run()


def test_tensors_that_wrap_others_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        fake = torch.zeros(SHAPE)
    for wrapper in (fake, torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])):
        with pytest.raises(AffineTransferExecutionError, match='source location 0: .*wraps other tensors'):
            local_program(wrapper, halves())


def test_dtypes_that_torch_cannot_copy_are_refused_before_anything_runs():
    odd = torch.empty(SHAPE, dtype=torch.uint4)
    plan = plan_transfer(replicated_map(SHAPE, 1), replicated_map(SHAPE, 1))
    with pytest.raises(AffineTransferExecutionError, match='torch.uint4 cannot be copied'):
        compile_transfer(plan, {0: odd}, {0: torch.empty(SHAPE, dtype=torch.uint4)}, TransferEndpoints({0: 0}, {0: 0}),
                         torch.uint4)


@pytest.mark.parametrize('staged', [False, True])
def test_autograd_notices_that_weights_have_changed(staged):
    weight = torch.ones(2, 6, requires_grad=True)
    result = (weight * weight).sum()
    local_program(full(), {0: weight, 1: torch.zeros(2, 6)}, staged=staged).run()
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        result.backward()


def test_tensors_that_a_progress_callback_makes_are_ordinary_ones():
    made = []
    local_program(full(), halves(), progress=lambda done, total: made.append(torch.ones(1, requires_grad=True))).run()
    (made[0] * made[0]).backward()
    assert made[0].grad.item() == 2


# ---------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize('bad', [{}, [], 'float32', 0])
def test_what_is_no_dtype_is_named(bad):
    for options in ({'dtype': bad}, {'dtype': DTYPE, 'target_dtype': bad}):
        with pytest.raises(AffineTransferExecutionError, match='is not a torch.dtype'):
            compile_transfer(rows_plan(), {0: full()}, halves(), HERE, **options)
    with pytest.raises(AffineTransferExecutionError, match='is not a torch.dtype'):
        compile_transfers([TransferRequest(rows_plan(), {0: full()}, halves(), dtype=bad)], HERE, DTYPE)


@pytest.mark.parametrize('requests', [None, 5])
def test_requests_and_their_buffers_are_lists(requests):
    with pytest.raises(AffineTransferExecutionError, match='expected TransferRequests'):
        compile_transfers(requests, HERE, DTYPE)
    program = compile_transfers([TransferRequest(rows_plan(), {0: full()}, halves())], HERE, DTYPE)
    with pytest.raises(AffineTransferExecutionError, match='expected a list with one mapping'):
        program.rebind(requests or 5)


@pytest.mark.parametrize('nodes', [{0: 0, 'a': 1}, {0: 10**30}, {0: True}])
def test_nodes_are_numbers(nodes):
    with pytest.raises(AffineTransferExecutionError, match='expected an int for every process'):
        local_program(full(), halves(), nodes=nodes)


# ---------------------------------------------------------------------------------------------- groups


def across(world, first, **options):
    """A program from process 0 to both, with its buffers."""
    sources = {0: full(first)} if world.rank == 0 else {}
    targets = {world.rank: torch.zeros(2, 6)}
    return compile_transfer(rows_plan(), sources, targets, ACROSS, DTYPE, timeout=20, **options), targets


def swapped_programs(world):
    """Actor and reference have one layout, and each process runs them in its own order."""
    world.init_default_group()
    programs = [across(world, first, staged=True, verify=True) for first in (0, 100)]
    words = []
    for number in (world.rank, 1 - world.rank):
        try:
            programs[number][0].run()
        except AffineTransferExecutionError as error:
            words.append(str(error))
    untouched = all(not targets[world.rank].any() for _, targets in programs)
    programs[0][0].run()
    return words, untouched, programs[0][1][world.rank]


def test_programs_of_equal_layout_do_not_take_each_others_messages():
    for rank, (words, untouched, target) in enumerate(run_processes(2, swapped_programs)):
        assert len(words) == 2 and all('their programs differ' in text for text in words)
        assert untouched and torch.equal(target, full()[2 * rank:2 * rank + 2])


def failed_rebind(world):
    """Process 1 cannot have new buffers; nobody else hears of it."""
    world.init_default_group()
    program, targets = across(world, 0)
    if world.rank == 1:
        freed = torch.zeros(2, 6)
        freed.untyped_storage().resize_(0)
        with pytest.raises(AffineTransferExecutionError, match='storage of 0 bytes'):
            program.rebind(target_buffers={1: freed})
    program.run()
    return targets[world.rank]


def test_the_others_do_not_mind_a_failed_rebind():
    assert torch.equal(torch.cat(run_processes(2, failed_rebind)), full())


def odd_default_device(world):
    world.init_default_group()
    buffers = full(), torch.zeros(2, 6)
    torch.set_default_device('meta')
    sources = {0: buffers[0]} if world.rank == 0 else {}
    targets = {world.rank: buffers[1]}
    compile_transfer(rows_plan(), sources, targets, ACROSS, DTYPE, timeout=20).run()
    torch.set_default_device('cpu')
    return targets[world.rank]


def test_the_default_device_does_not_matter():
    assert torch.equal(torch.cat(run_processes(2, odd_default_device)), full())


def forked(world):
    """The words that a fork of process 0 hears, while the group goes on."""
    world.init_default_group()
    program, targets = across(world, 0)
    words = ''
    if world.rank == 0:
        reader, writer = os.pipe()
        if not os.fork():
            try:
                program.run()
            except AffineTransferExecutionError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        words = os.read(reader, 4096).decode()
        os.wait()
    program.run()
    return words, targets[world.rank]


def test_a_fork_does_not_use_its_parents_connections():
    results = run_processes(2, forked)
    assert 'was forked from process' in results[0][0]
    assert torch.equal(torch.cat([target for _, target in results]), full())


def joined_again(world, port):
    """Process 1 dies; the others join anew at the same address, and the last process of the test in its place."""
    plan = plan_transfers(
        {'w': ParameterTransfer(contiguous_split_map(SHAPE, [2, 2], 0), replicated_map(SHAPE, 1), DTYPE)},
        endpoints=TransferEndpoints(source={0: 0}, target={
            0: 0,
            1: 2
        }))
    rank, errors = world.rank % 3 + world.rank // 3, []
    if world.rank == 3:
        world.store('again').wait(['now'])
    sources, targets = {'w': {0: full()}} if rank == 0 else {}, {}
    for attempt in range(world.rank // 3, 2):
        targets = {} if rank == 1 else {'w': {rank // 2: torch.zeros(2, 6)}}
        try:
            with join_transfer_group(f'127.0.0.1:{port}', rank, 3, timeout=30) as group:
                program = compile_transfer(plan, sources, targets, plan.endpoints, DTYPE, group=group, timeout=20)
                if world.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                program.run()
        except TransferBrokenError as error:
            # Whoever keeps the error does not keep the address.
            errors.append(error)
            # Until process 0 has left, the others would meet its old store there, and lose it.
            world.store('again').set('now', '') if rank == 0 else world.store('again').wait(['now'])
    return len(errors), targets


def test_survivors_join_again_at_the_same_address():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    results = run_processes(4, joined_again, port, may_die={1})
    for rank in (0, 2):
        broken, targets = results[rank]
        assert broken == 1 and torch.equal(targets['w'][rank // 2], full()[rank:rank + 2])
