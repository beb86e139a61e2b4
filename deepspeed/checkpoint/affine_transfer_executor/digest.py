# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Digests of what processes must have in common."""

import hashlib
from dataclasses import fields
from typing import Iterable

import numpy as np

from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.model_plan import PlannedClass
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer_executor.requests import StagingBudget

# Changes whenever processes with different numbers would not post the same messages.
PROTOCOL_VERSION = 2


def plan_digest(plan: TransferPlan, endpoints: TransferEndpoints, budget: StagingBudget, element_size: int) -> str:
    """What two processes must agree on to move one parameter, for callers that compare it themselves. Dtypes and the
    options of a transfer are not in it; a transfer compares those too.

    Args:
        plan: the copies.
        endpoints: which process owns which location.
        budget: decides how messages are cut.
        element_size: bytes of one element on the wire.

    Returns:
        32 hexadecimal digits.

    Example::

        plan_digest(plan, endpoints, StagingBudget(), torch.bfloat16.itemsize)
    """
    parts = [PROTOCOL_VERSION, plan_bytes(plan), endpoints_bytes(endpoints), budget_bytes(budget), element_size]
    return hash_of(parts).hex()


def budget_bytes(budget: StagingBudget) -> bytes:
    """A digest of all that decides how messages are cut."""
    return hash_of(getattr(budget, item.name) for item in fields(budget))


def class_bytes(group: PlannedClass) -> bytes:
    """A digest of what the plans of all processes have in common for one parameter of a model."""
    parts = [_int64(group.logical_shape), group.width]
    return hash_of(parts + [_int64(sorted(numel.items())) for numel in (group.source_numel, group.target_numel)])


def plan_bytes(plan: TransferPlan) -> bytes:
    """A digest of what a plan moves where; how it was found does not matter."""
    columns = plan.columns
    parts = [columns.ndim, _int64(plan.logical_shape)]
    parts += [_int64(column) for column in (columns.source_rank, columns.source_offset, columns.source_strides)]
    parts += [_int64(column) for column in (columns.target_rank, columns.target_offset, columns.target_strides)]
    parts += [_int64(columns.shape), columns.source_scale.astype('<f8').tobytes()]
    parts += [columns.target_scale.astype('<f8').tobytes()]
    parts += [_int64(sorted(plan.source_numel.items())), _int64(sorted(plan.target_numel.items()))]
    return hash_of(parts)


def endpoints_bytes(endpoints: TransferEndpoints) -> bytes:
    """A digest of the owners of all locations."""
    return hash_of([_int64(sorted(endpoints.source.items())), _int64(sorted(endpoints.target.items()))])


def hash_of(parts: Iterable) -> bytes:
    """16 bytes from ints, strings and bytes; where one part ends and the next begins counts."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        state.update(len(data).to_bytes(8, 'little'))
        state.update(data)
    return state.digest()


def _int64(values) -> bytes:
    return np.asarray(values, dtype='<i8').tobytes()
