# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a caller hands to the executor."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Optional

import torch

from deepspeed.checkpoint.affine.checks import MAX_ELEMENTS, shown
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError


@dataclass(frozen=True)
class StagingBudget:
    """How much memory a transfer may stage, and how its messages are cut. All processes must be given the same one.

    Args:
        bytes_per_peer: most bytes of one message. While a message travels the next one for the same peer is packed,
            so twice this is staged per peer and direction. It must hold at least one element.
        bytes_per_process: most bytes that a process stages in all, in both directions. Where it has too many peers
            for ``bytes_per_peer``, the messages of all processes are smaller.
        operations: most sends and receives that a process has in one round, at least 2.
        direct_bytes: segments of this many bytes or more travel in messages of their own, straight from the source's
            memory where they are contiguous there, and straight into the target's.

    Raises:
        AffineTransferExecutionError: not a positive integer, or more than 2**62.

    Example::

        StagingBudget(bytes_per_peer=4 << 20, bytes_per_process=64 << 20)
    """
    bytes_per_peer: int = 16 << 20
    bytes_per_process: int = field(default=256 << 20, kw_only=True)
    operations: int = field(default=64, kw_only=True)
    direct_bytes: int = field(default=1 << 20, kw_only=True)

    def __post_init__(self):
        for item in fields(self):
            value, least = getattr(self, item.name), 2 if item.name == 'operations' else 1
            if type(value) is not int or not least <= value <= MAX_ELEMENTS:
                raise AffineTransferExecutionError(
                    f'{item.name} is {shown(value)}; expected a number from {least} up, '
                    'at most 2**62')


@dataclass(frozen=True)
class TransferRequest:
    """One parameter's plan with the buffers that this process owns.

    Args:
        plan: the TransferPlan.
        source_buffers: source location -> tensor, for the locations of this process. Any strided view;
            its number of elements is the shard's, its shape is free. Segments address its row-major order.
        target_buffers: target location -> tensor, likewise. Written in place.
        name: how errors call the parameter.
        dtype: dtype of the sources, where it is not the batch's.
        target_dtype: dtype of the targets, where it is not the sources'. Floating point values (and complex
            ones) are cast before they are sent; integers and bools are never cast.

    Example::

        TransferRequest(plan, {0: trainer_shard}, {}, name='lm_head.weight')
    """
    plan: TransferPlan
    source_buffers: Mapping
    target_buffers: Mapping
    name: Optional[str] = field(default=None, kw_only=True)
    dtype: Optional[torch.dtype] = field(default=None, kw_only=True)
    target_dtype: Optional[torch.dtype] = field(default=None, kw_only=True)
