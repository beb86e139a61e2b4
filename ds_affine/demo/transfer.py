# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Plan and run every move. Trainers and rollouts call this alike; they differ in the buffers they bring."""

import time

import torch

from deepspeed.checkpoint.affine_transfer.planner import plan_transfer
from deepspeed.checkpoint.affine_transfer_executor.execute import execute_transfer
from deepspeed.checkpoint.affine_transfer_executor.group import join_transfer_group

from ds_affine.demo.layouts import FIRST_RANK, PROCESSES, ROLLOUTS, endpoints
from ds_affine.demo.line import Line
from ds_affine.demo.model import is_frozen

POLICY = "local_first_least_loaded"
DTYPE = torch.float32


def joint_group(assignment, store):
    """The group of all four processes, beside the worlds of two that trainers and rollouts have."""
    rank = FIRST_RANK[assignment.role] + assignment.rank
    return join_transfer_group(store, rank, PROCESSES, timeout=assignment.timeout)


def move_all(moves, source_buffers, target_buffers, locations, group):
    """One Line for each move.

    source_buffers: {location: tensor} by trainers' parameter name, what this process holds. target_buffers:
    {rollout: tensor} by move name. group: the joint group.
    """
    ends = endpoints(locations)
    lines = []
    for move in moves:
        started = time.perf_counter()
        plan = plan_transfer(target_map=move.target, source_map=move.source, replica_policy=POLICY, endpoints=ends)
        planned = time.perf_counter()
        sources = {}
        for part in move.parts:
            sources.update(source_buffers.get(part, {}))
        stats = execute_transfer(plan,
                                 sources,
                                 target_buffers.get(move.name, {}),
                                 ends,
                                 DTYPE,
                                 group=group,
                                 name=move.name)
        moved = time.perf_counter()
        lines.append(
            Line(name=move.name,
                 shape=move.target.logical_shape,
                 elements=move.target.numel,
                 frozen=is_frozen(move.name),
                 gathered_bytes=ROLLOUTS * move.target.numel * DTYPE.itemsize,
                 segments=len(plan.segments),
                 sent_bytes=stats.sent_bytes,
                 local_copy_bytes=stats.local_copy_bytes,
                 plan_seconds=planned - started,
                 move_seconds=moved - planned))
    return lines
