# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a caller hands to the executor, and what it gets back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Optional

import torch

from deepspeed.checkpoint.affine.checks import MAX_ELEMENTS, shown
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError


@dataclass(frozen=True)
class StagingBudget:
    """How much memory a transfer may stage.

    Args:
        bytes_per_peer: bytes staged for one peer in one direction at one time. What exceeds it travels in
            several rounds. It must hold at least one element.

    Raises:
        AffineTransferExecutionError: not a positive integer, or more than 2**62.

    Example::

        StagingBudget(bytes_per_peer=8 << 20)
    """
    bytes_per_peer: int = 32 << 20

    def __post_init__(self):
        if type(self.bytes_per_peer) is not int or not 1 <= self.bytes_per_peer <= MAX_ELEMENTS:
            raise AffineTransferExecutionError(f'bytes_per_peer is {shown(self.bytes_per_peer)}; expected a positive '
                                               'number of bytes, at most 2**62')


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


@dataclass(frozen=True)
class TransferStats:
    """What one process did in a transfer.

    Attributes:
        segments: segments that it sent, received or copied locally.
        chunks: messages that it sent and received.
        rounds: rounds of the whole transfer, on every process the same.
        local_copy_bytes: bytes written by local copies.
        sent_bytes, received_bytes: bytes on the wire, without the agreement.
        in_place_bytes: bytes of regions that were already where they belong, and were not touched.
        peak_staging_bytes: most memory that it staged at one time.
    """
    segments: int
    chunks: int
    rounds: int
    local_copy_bytes: int
    sent_bytes: int
    received_bytes: int
    in_place_bytes: int
    peak_staging_bytes: int
