# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Run transfer plans over torch.distributed, or within one process. Start here:

- ``apply_plan`` runs a plan in one process, without a group;
- ``execute_transfer`` moves one parameter, ``execute_transfers`` a batch of ``TransferRequest``;
- ``compile_transfer`` prepares the transfer of a model once, to be run after every training step;
- ``join_transfer_group`` joins processes of several jobs for it.
"""

from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer_executor.compiler import compile_transfer, compile_transfers
from deepspeed.checkpoint.affine_transfer_executor.digest import plan_digest
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError, TransferBrokenError
from deepspeed.checkpoint.affine_transfer_executor.execute import apply_plan, execute_transfer, execute_transfers
from deepspeed.checkpoint.affine_transfer_executor.group import TransferGroup, join_transfer_group
from deepspeed.checkpoint.affine_transfer_executor.program import TransferProgram
from deepspeed.checkpoint.affine_transfer_executor.progress import progress_bar
from deepspeed.checkpoint.affine_transfer_executor.report import TransferStats
from deepspeed.checkpoint.affine_transfer_executor.requests import StagingBudget, TransferRequest

__all__ = [
    'AffineTransferExecutionError', 'StagingBudget', 'TransferBrokenError', 'TransferEndpoints', 'TransferGroup',
    'TransferProgram', 'TransferRequest', 'TransferStats', 'apply_plan', 'compile_transfer', 'compile_transfers',
    'execute_transfer', 'execute_transfers', 'join_transfer_group', 'plan_digest', 'progress_bar'
]
