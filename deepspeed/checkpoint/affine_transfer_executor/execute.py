# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Run plans: over a process group, or within one process."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Dict, Iterable, List, Optional, Tuple

import torch

from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer_executor.agreement import BROKE_BEFORE, agree, named, numbers
from deepspeed.checkpoint.affine_transfer_executor.channel import Channel, WaitFailed
from deepspeed.checkpoint.affine_transfer_executor.errors import Explained, described
from deepspeed.checkpoint.affine_transfer_executor.moving import Message, copy_locally, pack, unpack
from deepspeed.checkpoint.affine_transfer_executor.patience import checked_timeout
from deepspeed.checkpoint.affine_transfer_executor.prepare import Prepared, check_request, prepare
from deepspeed.checkpoint.affine_transfer_executor.requests import StagingBudget, TransferRequest, TransferStats
from deepspeed.checkpoint.affine_transfer_executor.schedule import Link

DEFAULT_TIMEOUT = 300.0
NAMED = 3


def execute_transfer(plan: TransferPlan,
                     source_buffers: Mapping,
                     target_buffers: Mapping,
                     endpoints: TransferEndpoints,
                     dtype: torch.dtype,
                     budget: StagingBudget = StagingBudget(),
                     group=None,
                     *,
                     target_dtype: Optional[torch.dtype] = None,
                     timeout: float = DEFAULT_TIMEOUT,
                     name: Optional[str] = None) -> TransferStats:
    """Move one parameter. Every process of the group calls it, with the same plan and its own buffers.

    Only the number of elements of a buffer is checked. A plan addresses a buffer in row-major order of its own shape:
    for a transposed buffer pass a view in the shard's order, such as ``buffer.t()``.

    Args:
        plan: the copies.
        source_buffers: source location -> tensor, for the locations of this process (see TransferRequest).
        target_buffers: target location -> tensor, likewise; written in place.
        endpoints: location -> rank within ``group``.
        dtype: dtype of the sources, said here because a process without buffers must know it too.
        budget: staging memory.
        group: a torch.distributed process group, one from ``join_transfer_group``, or None for the default.
        target_dtype: dtype of the targets, where it is another: values are cast before they are sent.
        timeout: seconds to wait for any process, at the agreement and in each round; at most a million.
        name: how errors call the parameter.

    Returns:
        What this process did.

    Raises:
        AffineTransferExecutionError: refused before it began, on every process alike, with no target changed;
            or broken by a process that died or was late, with targets partly written.

    Example::

        execute_transfer(plan, {0: shard}, {}, TransferEndpoints({0: 0}, {0: 1}), torch.float32)
    """
    request = TransferRequest(plan, source_buffers, target_buffers, name=name)
    return execute_transfers([request], endpoints, dtype, budget, group, target_dtype=target_dtype, timeout=timeout)


def execute_transfers(requests: Iterable[TransferRequest],
                      endpoints: TransferEndpoints,
                      dtype: torch.dtype,
                      budget: StagingBudget = StagingBudget(),
                      group=None,
                      *,
                      target_dtype: Optional[torch.dtype] = None,
                      timeout: float = DEFAULT_TIMEOUT) -> TransferStats:
    """Move several parameters in one batch: one agreement, and messages that several parameters share.

    Every process of the group calls it with the same plans in the same order. ``dtype`` and
    ``target_dtype`` hold for requests which name none. Else as ``execute_transfer``.

    Example::

        execute_transfers([TransferRequest(plan, sources, targets, name='norm')], endpoints, torch.bfloat16)
    """
    channel = Channel.of(group)
    prepared, reason, patience = None, '', DEFAULT_TIMEOUT
    with channel.ending(BROKE_BEFORE):
        try:
            patience = checked_timeout(timeout)
            prepared = prepare(requests, endpoints, dtype, target_dtype, budget, channel.rank, channel.size)
        except Exception as error:
            # Of any kind: the others wait in the agreement, and must hear that this process cannot take part.
            reason = described(error)
    agree(channel, prepared.terms if prepared else None, reason, patience)
    return _run(prepared, channel, patience)


def apply_plan(plan: TransferPlan,
               source_buffers: Mapping,
               target_buffers: Mapping,
               *,
               target_dtype: Optional[torch.dtype] = None,
               name: Optional[str] = None) -> TransferStats:
    """Run a plan in this process, which has all its buffers. No process group is needed.

    Only the number of elements of a buffer is checked. A plan addresses a buffer in row-major order of its own shape:
    for a transposed buffer pass a view in the shard's order, such as ``buffer.t()``.

    Args:
        plan: the copies.
        source_buffers: source location -> tensor, all of one dtype.
        target_buffers: target location -> tensor; written in place.
        target_dtype: dtype of the targets, where it is not the sources'.
        name: how errors call the parameter.

    Returns:
        What was done.

    Raises:
        AffineTransferExecutionError: something does not fit; no target has changed.

    Example::

        apply_plan(plan, {0: full}, {0: torch.empty(8), 1: torch.empty(8)})
    """
    request = TransferRequest(plan, source_buffers, target_buffers, name=name)
    check_request(request, 0)
    dtypes = [tensor.dtype for tensor in source_buffers.values() if isinstance(tensor, torch.Tensor)]
    dtype = dtypes[0] if dtypes else target_dtype or torch.get_default_dtype()
    everywhere = _locations(plan, source_buffers, target_buffers)
    prepared = prepare([request], everywhere, dtype, target_dtype, StagingBudget(), 0, 1)
    return _run(prepared, None, DEFAULT_TIMEOUT)


def _locations(plan: TransferPlan, source_buffers: Mapping, target_buffers: Mapping) -> TransferEndpoints:
    """Every location that the plan or the caller names, on process 0."""
    sources = {*plan.source_numel, *source_buffers, *plan.columns.source_rank.tolist()}
    targets = {*plan.target_numel, *target_buffers, *plan.columns.target_rank.tolist()}
    return TransferEndpoints(dict.fromkeys(sources, 0), dict.fromkeys(targets, 0))


def _run(prepared: Prepared, channel: Optional[Channel], timeout: float) -> TransferStats:
    """Make the copies; ``channel`` is None where all of them are local."""
    what = 'the transfer broke while it ran, and targets may be partly written'
    with nullcontext() if channel is None else channel.ending(what):
        return _move(prepared, channel, timeout)


# Weights may have been made in inference mode, where only inference mode may write to them.
@torch.inference_mode()
def _move(prepared: Prepared, channel: Optional[Channel], timeout: float) -> TransferStats:
    schedule = prepared.schedule
    copied = in_place = 0
    for request, segments in zip(prepared.requests, schedule.locals):
        moved, left = copy_locally(request, segments, max(schedule.chunk_bytes // request.width, 1))
        copied, in_place = copied + moved, in_place + left
    staging = _Staging(channel.device if channel else torch.device('cpu'))
    chunks = 0
    for index in range(schedule.rounds):
        receives = staging.messages(schedule.receives, 'receive', index, schedule.chunk_bytes)
        sends = staging.messages(schedule.sends, 'send', index, schedule.chunk_bytes)
        chunks += len(receives) + len(sends)
        try:
            _round(prepared, channel, receives, sends, timeout)
        except WaitFailed as failure:
            raise Explained(_account(prepared, failure, receives + sends, index)) from failure
    return TransferStats(segments=schedule.segments,
                         chunks=chunks,
                         rounds=schedule.rounds,
                         local_copy_bytes=copied,
                         sent_bytes=sum(link.numbytes for link in schedule.sends),
                         received_bytes=sum(link.numbytes for link in schedule.receives),
                         in_place_bytes=in_place,
                         peak_staging_bytes=staging.numbytes)


class _Staging:
    """Staging memory, one piece per link, kept from round to round."""

    def __init__(self, device: torch.device):
        self.device = device
        self.held: Dict[Tuple[str, int], torch.Tensor] = {}

    @property
    def numbytes(self) -> int:
        return sum(data.numel() for data in self.held.values())

    def messages(self, links: Tuple[Link, ...], direction: str, index: int, limit: int) -> List[Message]:
        """The messages of round ``index``."""
        messages = []
        for link in links:
            start, stop = link.chunk(index, limit)
            if start == stop:
                continue
            key = (direction, link.peer)
            if key not in self.held:
                # The first chunk of a link is its largest.
                self.held[key] = torch.empty(stop - start, dtype=torch.uint8, device=self.device)
            messages.append(Message(link, start, stop, self.held[key][:stop - start]))
        return messages


def _round(prepared: Prepared, channel: Channel, receives: List[Message], sends: List[Message],
           timeout: float) -> None:
    """Post everything, then wait for everything: no process waits before its part of the round is posted."""
    for message in sends:
        pack(message, prepared.requests)
    pending = channel.post([(message.link.peer, message.data) for message in receives],
                           [(message.link.peer, message.data) for message in sends])
    deadline = time.monotonic() + timeout
    for operation in pending:
        channel.wait(operation, deadline)
    for message in receives:
        unpack(message, prepared.requests)


def _account(prepared: Prepared, failure: WaitFailed, messages: List[Message], index: int) -> str:
    """Whom this process waited for, and for what."""
    peers = failure.pending.peers
    concerned = [message for message in messages if message.link.peer in peers]
    touched = sorted({item for message in concerned for item in message.link.requests_in(message.start, message.stop)})
    names = [prepared.requests[item].name for item in touched[:NAMED]]
    if len(touched) > NAMED:
        names.append(f'{len(touched) - NAMED} more')
    return (f'waited for {named(peers)} ({failure.pending.action} {numbers(peers)}, round {index + 1} of '
            f'{prepared.schedule.rounds}, {", ".join(names)}): {failure}')
