# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""From plans and buffers to a program, after all processes have agreed on it."""

import os
from collections.abc import Mapping
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Union

import torch
import torch.distributed as dist

from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.model_plan import ModelPlan
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer_executor.agreement import (BROKE_BEFORE, COMPILE, REFUSED_BEFORE, Position,
                                                                     agree, attempting, named, refuse_broken)
from deepspeed.checkpoint.affine_transfer_executor.batch import Batch, check_names
from deepspeed.checkpoint.affine_transfer_executor.channel import Channel, WaitFailed
from deepspeed.checkpoint.affine_transfer_executor.digest import hash_of
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError, Explained
from deepspeed.checkpoint.affine_transfer_executor.links import link_hashes, rounds_of
from deepspeed.checkpoint.affine_transfer_executor.options import DEFAULT_TIMEOUT, Options
from deepspeed.checkpoint.affine_transfer_executor.prepare import prepare
from deepspeed.checkpoint.affine_transfer_executor.program import Recipe, TransferProgram
from deepspeed.checkpoint.affine_transfer_executor.requests import StagingBudget, TransferRequest
from deepspeed.checkpoint.affine_transfer_executor.rounds import SLOTS
from deepspeed.checkpoint.affine_transfer_executor.streams import side_stream

# Processes whose links are compared at one time: each takes as many numbers from every process.
COMPARED = 256


def compile_transfer(plan: Union[ModelPlan, TransferPlan],
                     source_buffers: Mapping,
                     target_buffers: Mapping,
                     endpoints: TransferEndpoints,
                     dtype,
                     *,
                     target_dtype=None,
                     group=None,
                     budget: StagingBudget = StagingBudget(),
                     timeout: float = DEFAULT_TIMEOUT,
                     staged: bool = False,
                     verify: bool = False,
                     multicast: str = 'auto',
                     nodes: Optional[Mapping] = None,
                     progress: Optional[Callable[[int, int], Any]] = None) -> TransferProgram:
    """Prepare the transfer of a model, or of one parameter, for any number of runs.

    Every process of the group calls it, with plans of the same move and its own buffers; then all call ``run``
    together as often as they like.

    Args:
        plan: a ``ModelPlan``, of all processes or of this one (``plan_transfers(..., process=)``), or the
            ``TransferPlan`` of one parameter.
        source_buffers: for a model ``{name: {source location: tensor}}`` with what this process has, by the names
            that sources have in the plan; for one parameter ``{source location: tensor}``. See TransferRequest.
        target_buffers: likewise; written in place by ``run``.
        endpoints: location -> rank within ``group``.
        dtype: dtype of the sources. One dtype, a mapping from parameter names to dtypes, or a function of the name:
            processes without buffers must know it too.
        target_dtype: likewise for the targets, where it is another: floating point values are cast before they are
            sent.
        group: a torch.distributed process group, one from ``join_transfer_group``, or None for the default group.
            Where there is none, and all locations are on process 0, everything is done in this process.
        budget: staging memory, and how messages are cut.
        timeout: seconds to wait for any process, at each agreement and in each round; at most a million.
        staged: receive into a second copy of the targets, and switch when all processes have received everything.
            Targets are never partly written then. The copy is as large as this process' targets, is kept, and does not
            count as staging memory.
        verify: after each run compare checksums of what sources hold and targets got, by parameter and link.
        multicast: ``auto`` lets receivers of the same bytes pass them on to each other where that relieves the busiest
            sender. It takes plans of all processes; with a plan of one process, and with ``off``, each receives
            all from the source.
        nodes: process -> node, for ``multicast``: then bytes leave a node once, rather than a process.
        progress: called with bytes done and bytes in all, of this process, after every round and after the local
            copies that are made meanwhile. What it raises ends the transfer for all.

    Returns:
        The program.

    Raises:
        AffineTransferExecutionError: refused, on every process alike.
        TransferBrokenError: a process died or did not come in time.

    Example::

        program = compile_transfer(plan, sources, targets, endpoints, torch.bfloat16, group=group)
        print(program.run())
    """
    options = dict(budget=budget,
                   timeout=timeout,
                   staged=staged,
                   verify=verify,
                   multicast=multicast,
                   nodes=nodes,
                   progress=progress)
    if isinstance(plan, ModelPlan):

        def make() -> Batch:
            return Batch.of_model(plan, source_buffers, target_buffers, dtype, target_dtype)

        names = {'source': plan.sources, 'target': plan.names}
        return _compile(make, endpoints, group, options, lambda side, buffers: _by_name(names[side], side, buffers))

    def make_one() -> Batch:
        return Batch.of_requests([TransferRequest(plan, source_buffers, target_buffers)], dtype, target_dtype)

    return _compile(make_one, endpoints, group, options, lambda side, buffers: [buffers])


def compile_transfers(requests: Iterable[TransferRequest],
                      endpoints: TransferEndpoints,
                      dtype: torch.dtype,
                      budget: StagingBudget = StagingBudget(),
                      group=None,
                      *,
                      target_dtype: Optional[torch.dtype] = None,
                      **options) -> TransferProgram:
    """As ``compile_transfer``, for requests as ``execute_transfers`` takes them.

    ``options`` are the other ones of ``compile_transfer``. The program's ``rebind`` takes one mapping of location to
    tensor for each request, in order.

    Example::

        program = compile_transfers([TransferRequest(plan, sources, targets)], endpoints, torch.bfloat16)
    """
    return _compile(lambda: Batch.of_requests(requests, dtype, target_dtype), endpoints, group,
                    dict(options, budget=budget), as_given)


def as_given(side: str, buffers: Sequence[Mapping]) -> List[Mapping]:
    """One mapping of location to tensor for each request.

    Raises:
        AffineTransferExecutionError: no list of them.
    """
    if not isinstance(buffers, (list, tuple)):
        raise AffineTransferExecutionError(f'{side} buffers are a {type(buffers).__name__}; expected a list with one '
                                           'mapping of location to tensor for each request')
    return list(buffers)


def compile_local(batch: Batch,
                  endpoints: TransferEndpoints,
                  options: Options,
                  arrange: Callable = as_given) -> TransferProgram:
    """A program for one process, with no group.

    Raises:
        AffineTransferExecutionError: something does not fit.
    """
    prepared = prepare(batch, endpoints, options, 0, 1)
    message_bytes = _message_bytes(options, 0, prepared.widest)
    return TransferProgram(Recipe(None, 0, endpoints, options, message_bytes, (), b'', None, arrange), prepared)


def _compile(make: Callable[[], Batch], endpoints: TransferEndpoints, group, options: dict,
             arrange: Callable) -> TransferProgram:
    if group is None and not dist.is_initialized() and _only_process_0(endpoints):
        return compile_local(make(), endpoints, Options(**options), arrange)
    channel = Channel.of(group)
    refuse_broken(channel)
    checked, terms, facts = Options(), None, ()
    with attempting(channel) as reasons:
        checked = Options(**options)
        prepared = prepare(make(), endpoints, checked, channel.rank, channel.size)
        hashes = link_hashes(prepared.links, prepared.moves, channel.rank)
        # Process 0 says which compilation this is: programs of equal layout must not meet each other's messages.
        number = int.from_bytes(os.urandom(8), 'little') >> 2
        facts = (prepared.links.most_operations, *(sum(side.values()) % 2**62 for side in hashes), number)
        terms = prepared.terms
    everyone = agree(channel, Position(COMPILE, terms, reasons, facts), checked.timeout)
    sent, received = (sum(row[place] for row in everyone) % 2**62 for place in (1, 2))
    if sent != received:
        _refuse_links(channel, *hashes, checked.timeout)
    message_bytes = _message_bytes(checked, max(row[0] for row in everyone), prepared.widest)
    digest = hash_of([*terms.values(), message_bytes, sent, everyone[0][3]])
    # There may be no room for staging memory or shadows here alone.
    with attempting(channel) as reasons:
        rounds = rounds_of(prepared.links, prepared.moves, checked.budget.direct_bytes, message_bytes)
        stream = side_stream(channel.device)
        recipe = Recipe(channel, channel.rank, endpoints, checked, message_bytes, rounds, digest, stream, arrange)
        program = TransferProgram(recipe, prepared)
    agree(channel, Position(COMPILE, None if reasons else {'programs': digest}, reasons), checked.timeout)
    return program


def _only_process_0(endpoints: TransferEndpoints) -> bool:
    return isinstance(endpoints, TransferEndpoints) and not any(
        any(owners.values()) for owners in (endpoints.source, endpoints.target))


def _message_bytes(options: Options, operations: int, widest: int) -> int:
    """Most bytes of a message, the same on all processes: both slots of every operation must fit.

    Raises:
        AffineTransferExecutionError: not one element fits.
    """
    budget = options.budget
    # A verification reads one message at either end.
    messages = SLOTS * operations + 2 * options.verify
    most = min(budget.bytes_per_peer, budget.bytes_per_process // max(messages, 1)) // widest * widest
    if not most:
        raise AffineTransferExecutionError(
            f'{REFUSED_BEFORE}: bytes_per_process is {budget.bytes_per_process}, but a process has {messages} '
            f'messages in memory at one time, and one element takes {widest} bytes')
    return most


def _refuse_links(channel: Channel, sent: Dict[int, int], received: Dict[int, int], timeout: float) -> None:
    """Find the links whose ends differ, together with all other processes, and have all of them raise."""
    theirs = torch.zeros(channel.size, dtype=torch.int64, device='cpu')
    with channel.ending(BROKE_BEFORE):
        for low in range(0, channel.size, COMPARED):
            high = min(low + COMPARED, channel.size)
            row = torch.tensor([sent.get(peer, 0) for peer in range(low, high)], dtype=torch.int64, device='cpu')
            try:
                rows = channel.gather(row, timeout)
            except WaitFailed as failure:
                raise Explained(f'could not compare the links of all processes ({failure})') from failure
            if low <= channel.rank < high:
                theirs = torch.stack(rows)[:, channel.rank - low]
    wrong = [peer for peer, value in enumerate(theirs.tolist()) if value != received.get(peer, 0)]
    reason = f'its plan lists other segments for what it receives from {named(wrong)} than the sender\'s does'
    agree(channel, Position(COMPILE, None if wrong else {}, [reason]), timeout)


def _by_name(names: Sequence[str], side: str, buffers: Mapping) -> List[Mapping]:
    check_names(side, buffers, set(names))
    return [buffers.get(name, {}) for name in names]
