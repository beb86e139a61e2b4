# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Check a batch against the buffers of one process, and make its schedule. Nothing is moved here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Dict, Iterable, Tuple

import numpy as np
import torch

from deepspeed.checkpoint.affine.checks import listed, shown
from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer.segments import SegmentColumns
from deepspeed.checkpoint.affine_transfer_executor.aliases import check_memory
from deepspeed.checkpoint.affine_transfer_executor.buffers import Shard
from deepspeed.checkpoint.affine_transfer_executor.digest import (PROTOCOL_VERSION, endpoints_bytes, hash_of,
                                                                  plan_bytes)
from deepspeed.checkpoint.affine_transfer_executor.dtypes import check_dtypes
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError
from deepspeed.checkpoint.affine_transfer_executor.requests import StagingBudget, TransferRequest
from deepspeed.checkpoint.affine_transfer_executor.schedule import Schedule, make_schedule


@dataclass(frozen=True)
class PreparedRequest:
    """One parameter of a batch, checked.

    Attributes:
        name: how errors call it.
        columns: the plan's segments that move something.
        source_process, target_process: int64[S], the owners of both ends of each segment.
        source_dtype: dtype of the sources; target_dtype: of the targets and on the wire.
        sources, targets: this process's buffers.
    """
    name: str
    columns: SegmentColumns
    source_process: np.ndarray
    target_process: np.ndarray
    source_dtype: torch.dtype
    target_dtype: torch.dtype
    sources: Dict[int, Shard]
    targets: Dict[int, Shard]

    @property
    def width(self) -> int:
        """Bytes of one element on the wire."""
        return self.target_dtype.itemsize


@dataclass(frozen=True)
class Prepared:
    """A batch that this process could run, and what the others must agree with.

    Attributes:
        requests: in the order in which they were given.
        schedule: links and rounds of this process.
        terms: name of what must agree -> 16 bytes that stand for it.
    """
    requests: Tuple[PreparedRequest, ...]
    schedule: Schedule
    terms: Dict[str, bytes]


# What processes compare before they move anything. The order is part of the protocol.
TERMS = ('names', 'plans', 'endpoints', 'dtypes', 'staging budget')


def prepare(requests: Iterable[TransferRequest], endpoints: TransferEndpoints, dtype: torch.dtype,
            target_dtype: torch.dtype, budget: StagingBudget, rank: int, size: int) -> Prepared:
    """Everything that can be known before a byte moves.

    Raises:
        ValueError: something does not fit; the message says which parameter, location and segment.
    """
    if not isinstance(endpoints, TransferEndpoints):
        raise AffineTransferExecutionError(f'endpoints are a {type(endpoints).__name__}; expected TransferEndpoints')
    if not isinstance(budget, StagingBudget):
        raise AffineTransferExecutionError(f'budget is a {type(budget).__name__}; expected StagingBudget')
    requests = list(requests)
    for index, request in enumerate(requests):
        check_request(request, index)
    names = [_name(request, index) for index, request in enumerate(requests)]
    prepared = []
    for name, request in zip(names, requests):
        try:
            prepared.append(_prepare_one(name, request, endpoints, dtype, target_dtype, rank, size))
        except ValueError as error:
            raise AffineTransferExecutionError(f'{name}: {error}') from error
    widest = max((request.width for request in prepared), default=1)
    if budget.bytes_per_peer < widest:
        raise AffineTransferExecutionError(f'bytes_per_peer is {budget.bytes_per_peer}; one element takes {widest}')
    check_memory(prepared, rank)
    terms = {
        'names': hash_of(names),
        'plans': hash_of(plan_bytes(request.plan) for request in requests),
        'endpoints': endpoints_bytes(endpoints),
        'dtypes': hash_of(part for request in prepared for part in (request.source_dtype, request.target_dtype)),
        'staging budget': hash_of([PROTOCOL_VERSION, budget.bytes_per_peer]),
    }
    return Prepared(tuple(prepared), make_schedule(prepared, rank, size, budget.bytes_per_peer), terms)


def check_request(request: TransferRequest, index: int) -> None:
    """Refuse a request that is not made of the right kinds of things; ``index`` names it.

    Raises:
        AffineTransferExecutionError: it is not.
    """
    if not isinstance(request, TransferRequest):
        raise AffineTransferExecutionError(f'request {index} is a {type(request).__name__}; expected TransferRequest')
    if not isinstance(request.plan, TransferPlan):
        raise AffineTransferExecutionError(f'request {index} has a {type(request.plan).__name__} for a plan')
    for side, buffers in (('source', request.source_buffers), ('target', request.target_buffers)):
        if not isinstance(buffers, Mapping):
            raise AffineTransferExecutionError(f'{_name(request, index)}: {side} buffers are a '
                                               f'{type(buffers).__name__}; expected a mapping of location to tensor')
        for location in buffers:
            if not isinstance(location, (int, np.integer)) or isinstance(location, bool):
                raise AffineTransferExecutionError(f'{_name(request, index)}: {side} buffers name the location '
                                                   f'{shown(location)}; expected an integer')


def _name(request: TransferRequest, index: int) -> str:
    return f'parameter {index}' if request.name is None else f'parameter {request.name!r}'


def _prepare_one(name: str, request: TransferRequest, endpoints: TransferEndpoints, dtype: torch.dtype,
                 target_dtype: torch.dtype, rank: int, size: int) -> PreparedRequest:
    plan = request.plan
    columns = plan.columns
    columns = columns.take(columns.numel != 0)
    source_dtype = request.dtype or dtype
    target_dtype = request.target_dtype or target_dtype or source_dtype
    check_dtypes(source_dtype, target_dtype, bool(columns.is_scaled.any()))
    if plan.numel and not len(columns):
        raise AffineTransferExecutionError(f'the plan moves nothing, but the parameter of shape {plan.logical_shape} '
                                           f'has {plan.numel} elements')
    sides = {}
    for side, buffers, known, owners in (('source', request.source_buffers, plan.source_numel, endpoints.source),
                                         ('target', request.target_buffers, plan.target_numel, endpoints.target)):
        ranks = getattr(columns, f'{side}_rank')
        last = getattr(columns, f'{side}_last')
        _check_addresses(side, columns, last)
        process = getattr(endpoints, f'{side}_processes')(ranks)
        _check_processes(side, ranks, process, size)
        needed = _needed(ranks, last, process == rank)
        _check_sizes(side, ranks, last, known)
        expected = source_dtype if side == 'source' else target_dtype
        sides[side] = process, _shards(side, buffers, needed, known, owners, rank, expected)
    return PreparedRequest(name, columns, sides['source'][0], sides['target'][0], source_dtype, target_dtype,
                           sides['source'][1], sides['target'][1])


def _check_addresses(side: str, columns: SegmentColumns, last: np.ndarray) -> None:
    """Refuse what ``torch.as_strided`` could not mean, and last addresses that wrapped around int64."""
    offset = getattr(columns, f'{side}_offset')
    backwards = ((getattr(columns, f'{side}_strides') < 0) & (columns.shape > 1)).any(axis=1)
    bad = np.flatnonzero((offset < 0) | (last < offset) | backwards | (columns.shape < 0).any(axis=1))
    if len(bad):
        raise AffineTransferExecutionError(f'{side} of {columns.segment(int(bad[0]))} has a negative offset, stride '
                                           'or size, or ends beyond int64')


def _check_processes(side: str, ranks: np.ndarray, process: np.ndarray, size: int) -> None:
    """Every process that owns a segment's end must be in the group."""
    beyond = np.flatnonzero(process >= size)
    if len(beyond):
        raise AffineTransferExecutionError(f'{side} location {ranks[beyond[0]]} is on process {process[beyond[0]]}, '
                                           f'but the group has {size} processes')


def _needed(ranks: np.ndarray, last: np.ndarray, mine: np.ndarray) -> Dict[int, int]:
    """Locations of this process that segments use, with the elements which their buffers need at least."""
    locations, inverse = np.unique(ranks[mine], return_inverse=True)
    extents = np.zeros(len(locations), dtype=np.int64)
    np.maximum.at(extents, inverse.reshape(-1), last[mine] + 1)
    return dict(zip(locations.tolist(), extents.tolist()))


def _check_sizes(side: str, ranks: np.ndarray, last: np.ndarray, known: Mapping) -> None:
    """Every segment must end inside its shard, on whichever process that is."""
    if not known:
        return
    locations, inverse = np.unique(ranks, return_inverse=True)
    sizes = np.array([known.get(location, 0) for location in locations.tolist()], dtype=np.int64)
    beyond = np.flatnonzero(last >= sizes[inverse.reshape(-1)])
    if len(beyond):
        index = int(beyond[0])
        raise AffineTransferExecutionError(f'the plan addresses element {last[index]} of {side} location '
                                           f'{ranks[index]}, which has {known.get(int(ranks[index]), 0)} elements')


def _shards(side: str, buffers: Mapping, needed: Dict[int, int], known: Mapping, owners: Mapping, rank: int,
            dtype: torch.dtype) -> Dict[int, Shard]:
    """This process's buffers, each checked against what the plan says of its location."""
    for location in needed:
        if location not in buffers:
            raise AffineTransferExecutionError(f'{side} location {location} belongs to process {rank} and has no '
                                               f'buffer; buffers were given for {listed(sorted(buffers))}')
    shards = {}
    for location, tensor in buffers.items():
        where = f'{side} location {location}'
        if owners.get(location) != rank:
            raise AffineTransferExecutionError(f'{where} has a buffer on process {rank}, but the endpoints give it to '
                                               f'process {owners.get(location)}')
        if known and location not in known:
            raise AffineTransferExecutionError(f'{where} has a buffer, but the plan knows {listed(sorted(known))}')
        shards[location] = _shard(side, where, tensor, dtype)
        found = shards[location].numel
        if known and found != known[location]:
            raise AffineTransferExecutionError(f'{where} has a buffer of {found} elements; the plan needs exactly '
                                               f'{known[location]}')
        if found < needed.get(location, 0):
            raise AffineTransferExecutionError(f'{where} has a buffer of {found} elements; the plan needs at least '
                                               f'{needed[location]}')
    return shards


def _shard(side: str, where: str, tensor: torch.Tensor, dtype: torch.dtype) -> Shard:
    try:
        shard = Shard(tensor)
    except AffineTransferExecutionError as error:
        raise AffineTransferExecutionError(f'{where}: {error}') from None
    if tensor.dtype != dtype:
        raise AffineTransferExecutionError(f'{where} has a buffer of {tensor.dtype}; expected {dtype}. A cast must be '
                                           'asked for: dtype is the sources\' and target_dtype the targets\'')
    if not tensor.is_conj() and not tensor.is_neg():
        return shard
    if side == 'target':
        raise AffineTransferExecutionError(f'{where} is a lazily conjugated or negated view; give the tensor itself')
    return Shard(tensor.resolve_conj().resolve_neg())
