# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How a transfer is to be run, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable, Optional

from deepspeed.checkpoint.affine.checks import shown
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError
from deepspeed.checkpoint.affine_transfer_executor.patience import checked_timeout
from deepspeed.checkpoint.affine_transfer_executor.requests import StagingBudget

DEFAULT_TIMEOUT = 300.0
MULTICAST = ('auto', 'off')


@dataclass(frozen=True)
class Options:
    """The options of ``compile_transfer``, under the same names.

    Raises:
        AffineTransferExecutionError: one of them is not what it must be.
    """
    budget: StagingBudget = StagingBudget()
    timeout: float = DEFAULT_TIMEOUT
    staged: bool = False
    verify: bool = False
    multicast: str = 'auto'
    nodes: Optional[Mapping] = None
    progress: Optional[Callable[[int, int], Any]] = None

    def __post_init__(self):
        if not isinstance(self.budget, StagingBudget):
            raise AffineTransferExecutionError(f'budget is a {type(self.budget).__name__}; expected StagingBudget')
        object.__setattr__(self, 'timeout', checked_timeout(self.timeout))
        for name in ('staged', 'verify'):
            if type(getattr(self, name)) is not bool:
                raise AffineTransferExecutionError(f'{name} is {shown(getattr(self, name))}; expected a bool')
        if not isinstance(self.multicast, str) or self.multicast not in MULTICAST:
            raise AffineTransferExecutionError(f'multicast is {shown(self.multicast)}; expected "auto" or "off"')
        if self.nodes is not None and not isinstance(self.nodes, Mapping):
            raise AffineTransferExecutionError(f'nodes are a {type(self.nodes).__name__}; expected a mapping of '
                                               'process to node')
        for process, node in (self.nodes or {}).items():
            if type(process) is not int or type(node) is not int or not -2**62 <= node <= 2**62:
                raise AffineTransferExecutionError(f'nodes give process {shown(process)} the node {shown(node)}; '
                                                   'expected an int for every process')
        if self.progress is not None and not callable(self.progress):
            raise AffineTransferExecutionError(f'progress is a {type(self.progress).__name__}; expected a function of '
                                               'bytes done and bytes in all')
