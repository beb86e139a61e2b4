# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Planning: from two maps of one parameter to shard-to-shard segments.

A plan is a list of strided copies from source shards into target shards. ``affine_transfer_executor``
runs it. Start here:

- ``plan_transfer(target_map=..., source_map=...)`` plans one parameter; ``TransferPlan`` is what it returns;
- ``plan_transfers`` plans a whole model of ``ParameterTransfer``;
- ``TransferEndpoints`` says which process owns which location.
"""

from deepspeed.checkpoint.affine_transfer.balance import BalanceReport
from deepspeed.checkpoint.affine_transfer.budget import PlanBudget, PlanStatistics
from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.errors import (AffineTransferError, InvalidMapError,
                                                         InvalidReplicaPolicyError, UnsupportedLayoutError)
from deepspeed.checkpoint.affine_transfer.model import plan_transfers
from deepspeed.checkpoint.affine_transfer.model_file import load_model_plan, save_model_plan
from deepspeed.checkpoint.affine_transfer.model_plan import LinkBytes, ModelPlan
from deepspeed.checkpoint.affine_transfer.parameter import ParameterTransfer
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer.planner import plan_transfer
from deepspeed.checkpoint.affine_transfer.replicas import ReplicaCandidate, ReplicaSelectionRequest
from deepspeed.checkpoint.affine_transfer.segments import SegmentColumns, TransferSegment

__all__ = [
    'AffineTransferError', 'BalanceReport', 'InvalidMapError', 'InvalidReplicaPolicyError', 'LinkBytes', 'ModelPlan',
    'ParameterTransfer', 'PlanBudget', 'PlanStatistics', 'ReplicaCandidate', 'ReplicaSelectionRequest',
    'SegmentColumns', 'TransferEndpoints', 'TransferPlan', 'TransferSegment', 'UnsupportedLayoutError',
    'load_model_plan', 'plan_transfer', 'plan_transfers', 'save_model_plan'
]
