# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Plan all parameters of a model at once: each distinct geometry once, for all processes or for one.

Parameters fall into *classes*: equal maps, location ids included, and equal options. Classes whose maps differ in
location ids alone share a *geometry*: the proofs of both maps, and where their blocks meet. What is left per
class is to choose holders, and per parameter a row in a table.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from deepspeed.checkpoint.affine.checks import MAX_ELEMENTS, mapping, shown
from deepspeed.checkpoint.affine.identity import geometry_digest
from deepspeed.checkpoint.affine_transfer.assemble import segment_columns, shard_numels
from deepspeed.checkpoint.affine_transfer.balance import balance_reads, by_choice
from deepspeed.checkpoint.affine_transfer.budget import PlanBudget
from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError, InvalidReplicaPolicyError, naming
from deepspeed.checkpoint.affine_transfer.meetings import (Meetings, Side, check_pair, meet, prove_source,
                                                           prove_target, reads_of, refusals)
from deepspeed.checkpoint.affine_transfer.model_plan import ModelPlan, PlannedClass, PlannedVariant
from deepspeed.checkpoint.affine_transfer.parameter import ParameterTransfer
from deepspeed.checkpoint.affine_transfer.planner import plan_transfer
from deepspeed.checkpoint.affine_transfer.replicas import POLICIES, Topology, without_rescaling
from deepspeed.checkpoint.affine_transfer.segments import SegmentColumns

BALANCED = 'balanced'


def plan_transfers(transfers,
                   *,
                   endpoints=None,
                   replica_policy='local_first_least_loaded',
                   nodes=None,
                   process=None,
                   limits=None):
    """Plan the move of a whole model.

    Args:
        transfers: mapping from parameter name to ``ParameterTransfer``. Its order does not matter.
        endpoints: ``TransferEndpoints`` for the location ids of all maps. Locations of different parameters may have
            one id; their buffers are told apart by the parameter's name.
        replica_policy: ``first_holder``, ``local_first_least_loaded``, ``balanced``, or a callable as in
            ``plan_transfer``, which is asked about every parameter in the order of their names.
        nodes: mapping from process to node, ints. Default: every process is alone on its node.
        process: plan only what this process sends or receives: the segments which the plan of all processes has for
            it, in the same order.
        limits: ``PlanBudget``, for each parameter.

    Returns:
        ``ModelPlan``.

    Raises:
        AffineTransferError: as for ``plan_transfer``, with the name of a parameter that it concerns.
    """
    budget = PlanBudget() if limits is None else limits
    names = sorted_names(transfers)
    sources = source_names(transfers, names)
    if process is not None and (type(process) is not int or process < 0):
        raise AffineTransferError(f'process is {shown(process)}; expected a rank of the endpoints, an int from 0 up')
    if not isinstance(endpoints, TransferEndpoints):
        raise InvalidReplicaPolicyError('plan_transfers needs endpoints: TransferEndpoints(source, target)')
    _check_total(transfers, names)
    if callable(replica_policy):
        return _plan_by_asking(transfers, names, sources, endpoints, replica_policy, process, budget)
    if not isinstance(replica_policy, str) or replica_policy not in (*POLICIES, BALANCED):
        raise InvalidReplicaPolicyError(f'replica_policy is {replica_policy!r}; the named policies are '
                                        f'{sorted((*POLICIES, BALANCED))}, or pass a callable')
    topology = Topology(endpoints, nodes)
    classes = _prove(group_by_maps(transfers, names), names, transfers, endpoints, budget)
    shares = balance_reads(classes, topology, budget) if replica_policy == BALANCED else None
    planned, variant_of, variants = [], np.zeros(len(names), np.int64), []
    for number, group in enumerate(classes):
        planned.append(group.planned())
        choices = _choices(group, topology, replica_policy, shares, process, budget)
        for members, columns in choices:
            variant_of[members] = len(variants)
            variants.append(_variant(number, columns, endpoints))
    return ModelPlan(tuple(names), sources, variant_of, tuple(variants), tuple(planned), endpoints, process,
                     shares.report if shares else None)


@dataclass(frozen=True)
class ParameterClass:
    """Parameters of equal maps and options.

    Attributes:
        members: int64[m], which names of the sorted list they are.
        transfer: one of them. name: its name, for messages.
        source, target: the proved maps, perhaps under other location ids.
        source_ids, target_ids: int64, location ids by shard. source_process, target_process: int64, likewise.
    """
    members: np.ndarray
    transfer: ParameterTransfer
    name: str
    source: Side
    target: Side
    source_ids: np.ndarray
    target_ids: np.ndarray
    source_process: np.ndarray
    target_process: np.ndarray

    def reads(self, meetings):
        """The reads of one parameter, with the candidates that scales allow."""
        reads = reads_of(self.source, self.target, meetings, self.source_ids, self.target_ids)
        return reads if self.transfer.scale_power == 1 else without_rescaling(reads)

    def planned(self):
        source, target = self.transfer.source_map, self.transfer.target_map
        return PlannedClass(source.logical_shape, shard_numels(source.columns), shard_numels(target.columns),
                            self.transfer.width)


def sorted_names(transfers):
    """The names of parameters, ascending.

    Raises:
        TypeError: anything but a mapping from strings to ``ParameterTransfer``.
    """
    for name, entry in mapping(transfers, 'transfers').items():
        if not isinstance(name, str):
            raise TypeError(f'a parameter name is {shown(name)}; expected a string')
        if not isinstance(entry, ParameterTransfer):
            raise TypeError(f'parameter {name!r} has a {type(entry).__name__}; expected a ParameterTransfer')
        if entry.source is not None and not isinstance(entry.source, str):
            raise TypeError(f'parameter {name!r} has the source {shown(entry.source)}; expected the name of one')
    return sorted(transfers)


def _check_total(transfers, names):
    """Raise unless all bytes that the model's targets take fit into the sums that are made of them."""
    taken = {}
    total = 0
    for name in names:
        entry = transfers[name]
        known = id(entry.target_map)
        if known not in taken:
            taken[known] = sum(shard_numels(entry.target_map.columns).values())
        total += taken[known] * entry.width
    if total > MAX_ELEMENTS:
        raise AffineTransferError(f'the targets of these {len(names)} parameters take {total} bytes, more than 2**62')


def source_names(transfers, names):
    """The name of the source buffers that each parameter reads.

    Raises:
        AffineTransferError: two parameters that read the same buffers but describe them differently.
    """
    readers, sources = {}, []
    for name in names:
        entry = transfers[name]
        source = entry.source_name(name)
        first = transfers[readers.setdefault(source, name)]
        if first is not entry and (first.source_map != entry.source_map or first.source_dtype != entry.source_dtype):
            raise AffineTransferError(
                f'parameters {readers[source]!r} and {name!r} both read the source {source!r}, but '
                'with different source maps or dtypes; tied weights have one source')
        sources.append(source)
    return tuple(sources)


def group_by_maps(transfers, names):
    """The members of each class, int64 arrays of places in ``names``, in the order of their first names."""
    by_identity = defaultdict(list)
    for index, name in enumerate(names):
        entry = transfers[name]
        by_identity[id(entry.target_map),
                    id(entry.source_map), entry.width, entry.scale_power, entry.partial_targets].append(index)
    by_value, digests = defaultdict(list), {}
    for members in by_identity.values():
        name = names[members[0]]
        with naming(name):
            by_value[_key(transfers[name], digests)] += members
    return sorted((np.array(sorted(members), np.int64) for members in by_value.values()),
                  key=lambda members: members[0])


def _key(entry, digests):
    """What makes parameters one class, wherever their maps come from: the order of shards does not matter."""
    key = [entry.width, entry.scale_power, entry.partial_targets]
    for side, part in (('target', entry.target_map), ('source', entry.source_map)):
        with refusals(side):
            columns = part.columns
        ids = np.sort(columns.location_ids)
        ranks = np.searchsorted(ids, columns.location_ids)
        known = (*_geometry(part), ranks.tobytes())
        if known not in digests:
            digests[known] = geometry_digest(part.logical_shape, columns.with_location_ids(ranks))
        key += [digests[known], ids.tobytes()]
    return tuple(key)


def _geometry(affine_map):
    return affine_map.logical_shape, affine_map.columns.pieces_digest


def _prove(classes, names, transfers, endpoints, budget):
    """Prove every distinct geometry once and return the classes as ``ParameterClass``."""
    proved, processes, result = {}, {}, []
    for members in classes:
        name = names[members[0]]
        entry = transfers[name]
        sides = []
        with naming(name):
            check_pair(entry.target_map, entry.source_map, budget)
            for part, key, prove in ((entry.source_map, 'source', lambda part: prove_source(part, budget)),
                                     (entry.target_map, entry.partial_targets,
                                      lambda part: prove_target(part, budget, entry.partial_targets))):
                known = (key, *_geometry(part))
                if known not in proved:
                    proved[known] = prove(part)
                sides.append(proved[known])
            ids = [part.columns.shard_ids for part in (entry.source_map, entry.target_map)]
            owners = []
            for shard_ids, lookup in zip(ids, (endpoints.source_processes, endpoints.target_processes)):
                known = (lookup.__name__, shard_ids.tobytes())
                if known not in processes:
                    processes[known] = lookup(shard_ids)
                owners.append(processes[known])
        result.append(ParameterClass(members, entry, name, *sides, *ids, *owners))
    return result


def _choices(group, topology, policy, shares, process, budget):
    """What the parameters of one class move: pairs of members (int64) and their ``SegmentColumns``."""
    mine = None if process is None else (group.source_process == process, group.target_process == process)
    if mine is not None and not (mine[0].any() or mine[1].any()):
        return [(group.members, SegmentColumns.from_segments([], len(group.transfer.source_map.logical_shape)))]
    with naming(group.name):
        meetings = meet(group.source, group.target, budget) if mine is None else _meet_for(group, *mine, budget)
        reads = group.reads(meetings)
        result = []
        for members, chosen in _chosen(group, reads, topology, policy, shares):
            kept = np.arange(
                len(chosen)) if mine is None else np.flatnonzero(mine[0][group.source.blocks.shard[chosen]]
                                                                 | mine[1][group.target.blocks.shard[meetings.target]])
            columns = segment_columns(group.source, group.target, meetings.take(kept), chosen[kept],
                                      len(group.transfer.source_map.logical_shape), budget, group.source_ids,
                                      group.target_ids)
            result.append((members, columns))
        return result


def _meet_for(group, source_mine, target_mine, budget):
    """The meetings that a process takes part in, or must know of because others may read what it holds or reads.

    Whose turn it is to read from a holder depends on all readers of the same holders, so these are listed whole.
    Regions with one holder leave no choice: of those only the process' own meetings are listed.
    """
    source, target = group.source, group.target
    rows = np.arange(len(target.blocks.shard))
    own = target_mine[target.blocks.shard]
    taken = meet(source, target, budget, rows=rows[own])
    regions = source.regions
    entry = np.repeat(np.arange(len(regions.holders)), np.diff(regions.starts))
    held = np.zeros(len(regions.holders), bool)
    held[entry[source_mine[source.blocks.shard[regions.blocks]]]] = True
    shared = np.diff(source.columns.set_starts) > 1
    contested = np.zeros(len(shared), bool)
    contested[regions.holders[held]] = True
    contested[regions.holders[taken.region]] = True
    wanted = np.flatnonzero(held | (contested & shared)[regions.holders])
    given = meet(source, target, budget, rows=rows[~own], regions=wanted)
    return Meetings.concatenate([taken, given])


def _chosen(group, reads, topology, policy, shares):
    """Which source block each read is served from: pairs of members and int64[R]."""
    if len(reads.read) == len(reads.target_rank):
        return [(group.members, reads.block)]
    if policy == BALANCED:
        return shares.choose(group, reads, topology)
    rows = POLICIES[policy](reads, topology, len(group.members))
    row_of = np.arange(len(group.members)) % len(rows)
    return [(group.members[np.isin(row_of, equal)], chosen) for equal, chosen in by_choice(np.arange(len(rows)), rows)]


def _plan_by_asking(transfers, names, sources, endpoints, selector, process, budget):
    """Plan every parameter by itself: a callable may answer each as it likes."""
    planned, variants = [], []
    for number, name in enumerate(names):
        entry = transfers[name]
        with naming(name):
            plan = plan_transfer(entry.target_map,
                                 entry.source_map,
                                 budget,
                                 replica_selector=selector,
                                 scale_power=entry.scale_power,
                                 partial_targets=entry.partial_targets)
            variant = _variant(number, plan.columns, endpoints)
        planned.append(PlannedClass(plan.logical_shape, plan.source_numel, plan.target_numel, entry.width))
        variants.append(variant if process is None else variant.of_process(process))
    return ModelPlan(tuple(names), sources, np.arange(len(names)), tuple(variants), tuple(planned), endpoints, process,
                     None)


def _variant(number, columns, endpoints):
    return PlannedVariant(number, columns, endpoints.source_processes(columns.source_rank),
                          endpoints.target_processes(columns.target_rank))
