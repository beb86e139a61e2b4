# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Check a batch against the buffers of one process, and find what it moves. Nothing is moved here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Dict, Optional, Sequence, Tuple

import numpy as np
import torch

from deepspeed.checkpoint.affine.checks import listed, shown
from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer.segments import SegmentColumns
from deepspeed.checkpoint.affine_transfer_executor.aliases import check_memory
from deepspeed.checkpoint.affine_transfer_executor.batch import Batch, check_buffers, parameter_name
from deepspeed.checkpoint.affine_transfer_executor.buffers import Shard
from deepspeed.checkpoint.affine_transfer_executor.digest import budget_bytes, endpoints_bytes, hash_of
from deepspeed.checkpoint.affine_transfer_executor.dtypes import check_dtypes
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError
from deepspeed.checkpoint.affine_transfer_executor.links import Links, links_of
from deepspeed.checkpoint.affine_transfer_executor.moves import Moves
from deepspeed.checkpoint.affine_transfer_executor.multicast import pass_on
from deepspeed.checkpoint.affine_transfer_executor.options import Options


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """One parameter of a batch, checked.

    Attributes:
        name: how errors call it.
        plan: its plan. ends: the same for this group and process.
        source_dtype: dtype of the sources; target_dtype: of the targets and on the wire.
        sources, targets: this process's buffers.
    """
    name: str
    plan: TransferPlan
    ends: 'Ends'
    source_dtype: torch.dtype
    target_dtype: torch.dtype
    sources: Dict[int, Shard]
    targets: Dict[int, Shard]

    @property
    def columns(self) -> SegmentColumns:
        """The plan's segments that move something."""
        return self.ends.columns

    @property
    def source_process(self) -> np.ndarray:
        """int64[S], the owner of each segment's source."""
        return self.ends.source_process

    @property
    def target_process(self) -> np.ndarray:
        """int64[S], the owner of each segment's target."""
        return self.ends.target_process

    @property
    def width(self) -> int:
        """Bytes of one element on the wire."""
        return self.target_dtype.itemsize


@dataclass(frozen=True, eq=False)
class Prepared:
    """A batch that this process could run, and what the others must agree with.

    Attributes:
        requests: in the order in which they were given.
        moves: what this process sends, receives or copies.
        links: the remote ones of them.
        widest: bytes of the widest element on the wire, of all processes.
        terms: name of what must agree -> 16 bytes that stand for it.
    """
    requests: Tuple[PreparedRequest, ...]
    moves: Moves
    links: Links
    widest: int
    terms: Dict[str, bytes]


def prepare(batch: Batch, endpoints: TransferEndpoints, options: Options, rank: int, size: int) -> Prepared:
    """Everything that this process can know by itself before a byte moves.

    Raises:
        ValueError: something does not fit; the message says which parameter, location and segment.
    """
    if not isinstance(endpoints, TransferEndpoints):
        raise AffineTransferExecutionError(f'endpoints are a {type(endpoints).__name__}; expected TransferEndpoints')
    requests = _requests(batch, endpoints, rank, size)
    widest = max((request.width for request in requests), default=1)
    budget = options.budget
    if budget.bytes_per_peer < widest:
        raise AffineTransferExecutionError(f'bytes_per_peer is {budget.bytes_per_peer}; one element takes {widest}')
    check_memory(requests, rank)
    multicast = options.multicast == 'auto' and batch.is_whole
    moves = Moves.of(requests)
    if multicast:
        _check_nodes(options.nodes, moves)
        moves = pass_on(moves, options.nodes)
    moves = moves.of_process(rank)
    links = links_of(moves, rank, size, budget.direct_bytes, budget.operations)
    return Prepared(requests, moves, links, widest, _terms(batch, requests, endpoints, options, multicast))


def _requests(batch: Batch, endpoints: TransferEndpoints, rank: int, size: int) -> Tuple[PreparedRequest, ...]:
    names = [parameter_name(request, index) for index, request in enumerate(batch.requests)]
    # Parameters of one geometry share their plan.
    ends: Dict[Tuple, Ends] = {}
    prepared = []
    for name, request in zip(names, batch.requests):
        key = id(request.plan), request.dtype, request.target_dtype
        try:
            if key not in ends:
                ends[key] = _ends(request.plan, *key[1:], endpoints, rank, size)
        except ValueError as error:
            raise AffineTransferExecutionError(f'{name}: {error}') from error
        one = PreparedRequest(name, request.plan, ends[key], *key[1:], {}, {})
        for side in ('source', 'target'):
            one = _with_side(one, side, getattr(request, f'{side}_buffers'), endpoints, rank)
        prepared.append(one)
    return tuple(prepared)


def _terms(batch: Batch, requests: Sequence[PreparedRequest], endpoints: TransferEndpoints, options: Options,
           multicast: bool) -> Dict[str, bytes]:
    nodes = sorted(options.nodes.items()) if multicast and options.nodes else None
    return {
        'names': hash_of(request.name for request in requests),
        'plans': hash_of(batch.plans),
        'endpoints': endpoints_bytes(endpoints),
        'dtypes': hash_of(part for request in requests for part in (request.source_dtype, request.target_dtype)),
        'staging budget': budget_bytes(options.budget),
        'options': hash_of([multicast, options.staged, options.verify, nodes]),
    }


def _check_nodes(nodes: Optional[Mapping], moves: Moves) -> None:
    for process in np.unique([moves.source_process, moves.target_process]).tolist() if nodes is not None else ():
        if type(nodes.get(process)) is not int:
            raise AffineTransferExecutionError(f'nodes give process {process} the node {shown(nodes.get(process))}; '
                                               'expected an int for every process')


@dataclass(frozen=True, eq=False)
class Ends:
    """A plan whose two ends fit this group, and what one process needs for it.

    Attributes:
        columns: the plan's segments that move something.
        source_process, target_process: int64[S].
        source_needed, target_needed: location of this process -> elements that segments use of its buffer.
    """
    columns: SegmentColumns
    source_process: np.ndarray
    target_process: np.ndarray
    source_needed: Dict[int, int]
    target_needed: Dict[int, int]


def _ends(plan: TransferPlan, source_dtype: torch.dtype, target_dtype: torch.dtype, endpoints: TransferEndpoints,
          rank: int, size: int) -> Ends:
    columns = plan.columns
    columns = columns.take(columns.numel != 0)
    check_dtypes(source_dtype, target_dtype, bool(columns.is_scaled.any()))
    found = []
    for side, known in (('source', plan.source_numel), ('target', plan.target_numel)):
        ranks = getattr(columns, f'{side}_rank')
        last = getattr(columns, f'{side}_last')
        _check_addresses(side, columns, last)
        process = getattr(endpoints, f'{side}_processes')(ranks)
        _check_processes(side, ranks, process, size)
        _check_sizes(side, ranks, last, known)
        found.append((process, _needed(ranks, last, process == rank)))
    return Ends(columns, *(process for process, _ in found), *(needed for _, needed in found))


def with_buffers(prepared: Prepared, sources: Optional[Sequence[Mapping]], targets: Optional[Sequence[Mapping]],
                 endpoints: TransferEndpoints, rank: int) -> Prepared:
    """The same batch with other buffers: for each parameter a mapping of location to tensor; None keeps a side's.

    Raises:
        AffineTransferExecutionError: a buffer that does not fit, as in ``prepare``.
    """
    requests = list(prepared.requests)
    for side, buffers in (('source', sources), ('target', targets)):
        if buffers is not None and len(buffers) != len(requests):
            raise AffineTransferExecutionError(f'{side} buffers are given for {len(buffers)} parameters; expected one '
                                               f'mapping for each of {len(requests)}')
        for index, given in enumerate(buffers or ()):
            requests[index] = _with_side(requests[index], side, given, endpoints, rank)
    check_memory(requests, rank)
    return replace(prepared, requests=tuple(requests))


def _with_side(request: PreparedRequest, side: str, buffers: Mapping, endpoints: TransferEndpoints,
               rank: int) -> PreparedRequest:
    check_buffers(request.name, side, buffers)
    try:
        shards = _shards(side, buffers, getattr(request.ends, f'{side}_needed'),
                         getattr(request.plan, f'{side}_numel'), getattr(endpoints, side), rank,
                         getattr(request, f'{side}_dtype'))
    except ValueError as error:
        raise AffineTransferExecutionError(f'{request.name}: {error}') from error
    return replace(request, **{f'{side}s': shards})


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
    if side == 'target' and (tensor.is_conj() or tensor.is_neg()):
        raise AffineTransferExecutionError(f'{where} is a lazily conjugated or negated view; give the tensor itself')
    return shard
