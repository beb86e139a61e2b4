# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What processes tell the launcher, which never loads torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """What one process has to say of one moved parameter.

    frozen: rollouts may still hold shards of it. gathered_bytes: what all rollouts together would have received if
    each had taken the whole parameter. exact: None on a trainer, which checks nothing.
    """
    name: str
    shape: tuple
    elements: int
    frozen: bool
    gathered_bytes: int
    segments: int
    sent_bytes: int
    local_copy_bytes: int
    plan_seconds: float
    move_seconds: float
    exact: bool = None
