# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Planning: from two maps of one parameter to shard-to-shard segments.

A plan is a list of strided copies from source shards into target shards. ``affine_transfer_executor``
runs it.
"""

from deepspeed.checkpoint.affine_transfer.budget import PlanBudget, PlanStatistics
from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.errors import (AffineTransferError, InvalidMapError,
                                                         InvalidReplicaPolicyError, UnsupportedLayoutError)
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer.planner import plan_transfer
from deepspeed.checkpoint.affine_transfer.replicas import ReplicaCandidate, ReplicaSelectionRequest
from deepspeed.checkpoint.affine_transfer.segments import SegmentColumns, TransferSegment

__all__ = [
    'AffineTransferError', 'InvalidMapError', 'InvalidReplicaPolicyError', 'UnsupportedLayoutError', 'PlanBudget',
    'PlanStatistics', 'ReplicaCandidate', 'ReplicaSelectionRequest', 'SegmentColumns', 'TransferEndpoints',
    'TransferPlan', 'TransferSegment', 'plan_transfer'
]
