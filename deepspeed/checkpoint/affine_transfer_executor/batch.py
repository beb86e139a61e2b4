# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The parameters that are moved together, from a plan of one, of a model, or from requests."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch

from deepspeed.checkpoint.affine.checks import listed, shown
from deepspeed.checkpoint.affine_transfer.model_plan import ModelPlan
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer_executor.digest import class_bytes, plan_bytes
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError
from deepspeed.checkpoint.affine_transfer_executor.requests import TransferRequest


@dataclass(frozen=True, eq=False)
class Batch:
    """Checked requests, each with its dtypes.

    Attributes:
        requests: in an order that is the same on every process.
        plans: one entry per request; equal on two processes that have plans of the same move.
        is_whole: whether the plans have the segments of all processes.
    """
    requests: Tuple[TransferRequest, ...]
    plans: Tuple[bytes, ...]
    is_whole: bool

    @classmethod
    def of_requests(cls, requests: Iterable[TransferRequest], dtype, target_dtype) -> 'Batch':
        """Requests as a caller gave them; the dtypes hold for those that name none.

        Raises:
            AffineTransferExecutionError: anything of another type.
        """
        if not isinstance(requests, Iterable):
            raise AffineTransferExecutionError(f'requests are a {type(requests).__name__}; expected TransferRequests')
        requests = list(requests)
        for index, request in enumerate(requests):
            check_request(request, index)
            _check_moves_something(request.plan, parameter_name(request, index))
        digests: Dict[int, bytes] = {}
        for request in requests:
            digests.setdefault(id(request.plan), plan_bytes(request.plan))
        named = [_with_dtypes(request, dtype, target_dtype) for request in requests]
        return cls(tuple(named), tuple(digests[id(request.plan)] for request in requests), True)

    @classmethod
    def of_model(cls, plan: ModelPlan, source_buffers: Mapping, target_buffers: Mapping, dtype,
                 target_dtype) -> 'Batch':
        """All parameters of a model by name; arguments as for ``compile_transfer``.

        Raises:
            AffineTransferExecutionError: buffers for names that the plan does not have, or dtypes of another width
                than it was made for.
        """
        check_names('source', source_buffers, set(plan.sources))
        check_names('target', target_buffers, set(plan.names))
        classes = [plan.classes[variant.number] for variant in plan.variants]
        plans: Dict[int, TransferPlan] = {}
        requests: List[TransferRequest] = []
        for name, source, variant in zip(plan.names, plan.sources, plan.variant_of.tolist()):
            if variant not in plans:
                plans[variant] = plan[name]
            request = TransferRequest(plans[variant],
                                      source_buffers.get(source, {}),
                                      target_buffers.get(name, {}),
                                      name=name)
            check_request(request, len(requests))
            request = _with_dtypes(request, _of_name(dtype, name, 'dtype'),
                                   _of_name(target_dtype, name, 'target_dtype'))
            _check_width(request, classes[variant].width)
            requests.append(request)
        digests = [class_bytes(group) for group in classes]
        return cls(tuple(requests), tuple(digests[variant] for variant in plan.variant_of.tolist()), plan.process
                   is None)


def check_request(request: TransferRequest, index: int) -> None:
    """Refuse a request that is not made of the right kinds of things; ``index`` names it.

    Raises:
        AffineTransferExecutionError: it is not.
    """
    if not isinstance(request, TransferRequest):
        raise AffineTransferExecutionError(f'request {index} is a {type(request).__name__}; expected TransferRequest')
    name = parameter_name(request, index)
    if not isinstance(request.plan, TransferPlan):
        raise AffineTransferExecutionError(f'request {index} has a {type(request.plan).__name__} for a plan')
    check_buffers(name, 'source', request.source_buffers)
    check_buffers(name, 'target', request.target_buffers)


def check_buffers(name: str, side: str, buffers: Mapping) -> None:
    """Require a mapping from location ids.

    Raises:
        AffineTransferExecutionError: anything else; ``name`` and ``side`` say where.
    """
    if not isinstance(buffers, Mapping):
        raise AffineTransferExecutionError(
            f'{name}: {side} buffers are a {type(buffers).__name__}; expected a mapping '
            'of location to tensor')
    for location in buffers:
        if not isinstance(location, (int, np.integer)) or isinstance(location, bool):
            raise AffineTransferExecutionError(f'{name}: {side} buffers name the location {shown(location)}; expected '
                                               'an integer')


def _check_moves_something(plan: TransferPlan, name: str) -> None:
    if plan.numel and not plan.columns.numel.any():
        raise AffineTransferExecutionError(f'{name}: the plan moves nothing, but the parameter of shape '
                                           f'{plan.logical_shape} has {plan.numel} elements')


def parameter_name(request: TransferRequest, index: int) -> str:
    """How messages call the parameter of a request, by its place in the batch where it has no name."""
    return f'parameter {index}' if request.name is None else f'parameter {request.name!r}'


def _with_dtypes(request: TransferRequest, dtype, target_dtype) -> TransferRequest:
    source = dtype if request.dtype is None else request.dtype
    target = target_dtype if request.target_dtype is None else request.target_dtype
    target = source if target is None else target
    for value in (source, target):
        if not isinstance(value, torch.dtype):
            name = '' if request.name is None else f'parameter {request.name!r}: '
            raise AffineTransferExecutionError(f'{name}{shown(value)} is not a torch.dtype')
    return replace(request, dtype=source, target_dtype=target)


def _of_name(rule: Any, name: str, what: str) -> Optional[torch.dtype]:
    """The dtype that a rule has for a parameter: one dtype for all, a mapping from names, or a function of them."""
    if isinstance(rule, Mapping):
        if name not in rule:
            raise AffineTransferExecutionError(f'parameter {name!r} has no entry in {what}')
        return rule[name]
    return rule(name) if callable(rule) else rule


def check_names(side: str, buffers: Mapping, known: set) -> None:
    """Require a mapping whose keys are names of a plan's buffers.

    Raises:
        AffineTransferExecutionError: anything else.
    """
    if not isinstance(buffers, Mapping):
        raise AffineTransferExecutionError(
            f'{side} buffers are a {type(buffers).__name__}; expected a mapping of name '
            'to a mapping of location to tensor')
    unknown = [name for name in buffers if name not in known]
    if unknown:
        raise AffineTransferExecutionError(f'{side} buffers are given for {listed(unknown)}, which the plan does not '
                                           'have; expected {name: {location: tensor}} for '
                                           f'{listed(sorted(known))}')


def _check_width(request: TransferRequest, width: int) -> None:
    wire = request.target_dtype
    if isinstance(wire, torch.dtype) and wire.itemsize != width:
        raise AffineTransferExecutionError(f'parameter {request.name!r} was planned for {width} bytes per element; '
                                           f'{wire} has {wire.itemsize}. Is it the target_dtype of its '
                                           'ParameterTransfer?')
