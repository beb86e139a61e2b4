# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How large a plan may become, and how large it became."""

from dataclasses import dataclass, fields

from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError


@dataclass(frozen=True)
class PlanBudget:
    """Bounds on one planning run.

    Exceeding one raises before the step that would exceed it starts, so a malformed map costs an error and
    no memory. The defaults admit one parameter over tens of thousands of ranks.

    Args:
        max_ndim: axes of the parameter.
        max_pieces_per_map: pieces of either map.
        max_pair_checks: pairs of source and target blocks that meet.
        max_segments: segments of the plan.
        max_merge_passes: passes over the segments that merge neighbours.
        max_plan_bytes: bytes of the plan's columns.
        max_merge_checks: pairs of neighbouring segments compared while merging.

    Raises:
        AffineTransferError: a limit is not an integer, or negative.

    Example::

        PlanBudget(max_segments=1000)
    """
    max_ndim: int = 8
    max_pieces_per_map: int = 1 << 24
    max_pair_checks: int = 1 << 26
    max_segments: int = 1 << 26
    max_merge_passes: int = 8
    max_plan_bytes: int = 1 << 33
    max_merge_checks: int = 1 << 32

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 0:
                raise AffineTransferError(f'{field.name} is {value!r}; expected an integer of 0 or more')


@dataclass(frozen=True)
class PlanStatistics:
    """Counts from one planning run.

    A plan that was read back has only the figures of its segments, and zeros for the maps it came from.

    Attributes:
        source_pieces: held regions of the source map.
        target_pieces: target pieces that are not empty.
        pair_checks: meetings of target pieces and source regions.
        segments_before_merge: the same number: every meeting is one segment at first.
        segments: segments of the plan, after neighbours were merged.
        plan_bytes: size of the plan's columns.
    """
    source_pieces: int
    target_pieces: int
    pair_checks: int
    segments_before_merge: int
    segments: int
    plan_bytes: int
