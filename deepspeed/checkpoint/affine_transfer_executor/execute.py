# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Run plans once: over a process group, or within one process."""

from collections.abc import Mapping
from typing import Iterable, Optional

import torch

from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer_executor.batch import Batch, check_request
from deepspeed.checkpoint.affine_transfer_executor.compiler import compile_local, compile_transfers
from deepspeed.checkpoint.affine_transfer_executor.options import DEFAULT_TIMEOUT, Options
from deepspeed.checkpoint.affine_transfer_executor.report import TransferStats
from deepspeed.checkpoint.affine_transfer_executor.requests import StagingBudget, TransferRequest


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
                     name: Optional[str] = None,
                     **options) -> TransferStats:
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
        options: the others of ``compile_transfer``: ``staged``, ``verify``, ``multicast``, ``nodes``, ``progress``.

    Returns:
        What this process did.

    Raises:
        AffineTransferExecutionError: refused before it began, on every process alike, with no target changed. With
            ``verify`` also where targets are not what was sent; they have changed then, unless they are ``staged``.
        TransferBrokenError: broken by a process that died or was late, with targets partly written, unless they are
            ``staged``.

    Example::

        execute_transfer(plan, {0: shard}, {}, TransferEndpoints({0: 0}, {0: 1}), torch.float32)
    """
    request = TransferRequest(plan, source_buffers, target_buffers, name=name)
    return execute_transfers([request],
                             endpoints,
                             dtype,
                             budget,
                             group,
                             target_dtype=target_dtype,
                             timeout=timeout,
                             **options)


def execute_transfers(requests: Iterable[TransferRequest],
                      endpoints: TransferEndpoints,
                      dtype: torch.dtype,
                      budget: StagingBudget = StagingBudget(),
                      group=None,
                      *,
                      target_dtype: Optional[torch.dtype] = None,
                      timeout: float = DEFAULT_TIMEOUT,
                      **options) -> TransferStats:
    """Move several parameters in one batch: one agreement, and messages that several parameters share.

    It is ``compile_transfers`` and one ``run``; who moves the same parameters again keeps the program.

    Every process of the group calls it with the same plans in the same order. ``dtype`` and
    ``target_dtype`` hold for requests which name none. Else as ``execute_transfer``.

    Example::

        execute_transfers([TransferRequest(plan, sources, targets, name='norm')], endpoints, torch.bfloat16)
    """
    program = compile_transfers(requests,
                                endpoints,
                                dtype,
                                budget,
                                group,
                                target_dtype=target_dtype,
                                timeout=timeout,
                                **options)
    return program.run()


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
    batch = Batch.of_requests([request], dtype, target_dtype)
    return compile_local(batch, _everywhere(plan, source_buffers, target_buffers), Options()).run()


def _everywhere(plan: TransferPlan, source_buffers: Mapping, target_buffers: Mapping) -> TransferEndpoints:
    """Every location that the plan or the caller names, on process 0."""
    sources = {*plan.source_numel, *source_buffers, *plan.columns.source_rank.tolist()}
    targets = {*plan.target_numel, *target_buffers, *plan.columns.target_rank.tolist()}
    return TransferEndpoints(dict.fromkeys(sources, 0), dict.fromkeys(targets, 0))
