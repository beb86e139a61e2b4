# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The policy ``balanced``: the busiest sender of a whole model sends as little as it can.

What one target reads from one set of holders, in all parameters of one class, is a *batch* of equal reads.
Whatever leaves no choice is counted first. Then batches are dealt out, those of the largest reads first, each
read to the holder that sends least so far. What a batch deals to a holder is a stretch of its parameters, so a
process that knows the stretches finds the holder of any read by itself.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Dict, Tuple

import numpy as np

from deepspeed.checkpoint.affine_geometry.columns import row_ids
from deepspeed.checkpoint.affine_transfer.errors import naming
from deepspeed.checkpoint.affine_transfer.meetings import meet
from deepspeed.checkpoint.affine_transfer.replicas import nearest, same_candidates


@dataclass(frozen=True)
class BalanceReport:
    """What was reached, in bytes, and what no choice can beat that reads from one's own process or node where it can.

    Attributes:
        busiest_bytes, lower_bound_bytes: what the busiest process sends to others.
        busiest_node_bytes, node_lower_bound_bytes: what the busiest node sends to other nodes.
    """
    busiest_bytes: int
    lower_bound_bytes: int
    busiest_node_bytes: int
    node_lower_bound_bytes: int


@dataclass(frozen=True)
class _Batch:
    """Equal reads of one target that the same holders can serve.

    Attributes:
        key: class, offer, wanted factor, distance and target id.
        place: what orders batches of equal reads, however the holder sets of their maps are numbered: class, target
            id, distance and first corner in the parameter.
        members: how many reads. size: bytes of each.
        senders: processes of the holders, in the order of their location ids.
        crosses: whether the reader is on another node than the holders.
    """
    key: Tuple[int, int, float, int, int]
    place: Tuple[int, ...]
    members: int
    size: int
    senders: Tuple[int, ...]
    crosses: bool


class _Loads:
    """Bytes that processes send to others, and nodes to other nodes, as far as they are dealt out."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.process = defaultdict(int)
        self.node = defaultdict(int)

    def node_of(self, process):
        return process if self.nodes is None else self.nodes[process]

    def add(self, process, size, crosses):
        self.process[process] += size
        if crosses:
            self.node[self.node_of(process)] += size


@dataclass(frozen=True)
class Shares:
    """Whom each read of the model is dealt to.

    Attributes:
        stretches: by the key of a batch: where each holder's parameters end, int64[holders].
        numbers: the number of a class by its first member.
    """
    stretches: Dict[Tuple[int, int, float, int, int], np.ndarray]
    numbers: Dict[int, int]
    report: BalanceReport

    def choose(self, group, reads, topology):
        """Which source block each read of each member is served from: pairs of members and int64[R]."""
        near = nearest(reads, topology)
        number = self.numbers[int(group.members[0])]
        chosen = np.tile(near.reads.block[near.first], (len(group.members), 1))
        place = np.arange(len(group.members))
        open_reads = np.flatnonzero((near.count > 1) & ~near.local)
        keys = zip(reads.offer[open_reads].tolist(), reads.wanted[open_reads].tolist(),
                   near.distance[open_reads].tolist(), reads.target_rank[open_reads].tolist())
        for read, key in zip(open_reads.tolist(), keys):
            holder = np.searchsorted(self.stretches[(number, *key)], place, 'right')
            chosen[:, read] = near.reads.block[near.first[read] + holder]
        return by_choice(group.members, chosen)


def by_choice(members, chosen):
    """Put members with equal rows of ``chosen`` (int64[m, R]) together: pairs of members and int64[R]."""
    rows = defaultdict(list)
    for place, row in enumerate(chosen):
        rows[row.tobytes()].append(place)
    return [(members[places], chosen[places[0]]) for places in rows.values()]


def balance_reads(classes, topology, budget):
    """Deal out the reads of all classes.

    Args:
        classes: ``ParameterClass``, in an order that is the same on every process.
    """
    loads, batches = _Loads(topology.nodes), []
    for number, parameters in enumerate(classes):
        with naming(parameters.name):
            meetings = meet(parameters.source, parameters.target, budget)
            near = nearest(parameters.reads(meetings), topology)
        batches += _batches(number, parameters, meetings, near, topology, loads)
    forced = dict(loads.process), dict(loads.node)
    stretches = {}
    for batch in sorted(batches, key=lambda batch: (-batch.size, batch.place)):
        counts = _deal(batch, loads)
        stretches[batch.key] = np.cumsum(counts)
        for process, count in zip(batch.senders, counts.tolist()):
            loads.add(process, count * batch.size, batch.crosses)
    numbers = {int(parameters.members[0]): number for number, parameters in enumerate(classes)}
    return Shares(stretches, numbers, _report(batches, loads, *forced))


def _batches(number, parameters, meetings, near, topology, loads):
    """The batches of a class that leave a choice; what leaves none is added to ``loads``."""
    volume = (meetings.upper - meetings.lower).prod(axis=1) * parameters.transfer.width
    reads, members = near.reads, len(parameters.members)
    sender, _ = topology.processes(reads)
    crosses = near.distance // 2 == 2
    single = np.flatnonzero((near.count == 1) & ~near.local)
    ids, first = row_ids(sender[near.first[single]], crosses[single])
    for size, read in zip(_sums(ids, volume[single]), single[first].tolist()):
        loads.add(int(sender[near.first[read]]), size * members, bool(crosses[read]))
    choice = np.flatnonzero((near.count > 1) & ~near.local)
    alike, _ = same_candidates(reads, near.distance)
    ids, first = row_ids(alike[choice], reads.target_rank[choice])
    # The first of each batch in the parameter.
    order = np.lexsort((*meetings.lower[choice].T[::-1], ids))
    corners = meetings.lower[choice[order[np.searchsorted(ids[order], np.arange(len(first)))]]].tolist()
    batches = []
    for size, read, corner in zip(_sums(ids, volume[choice]), choice[first].tolist(), corners):
        distance, target = int(near.distance[read]), int(reads.target_rank[read])
        key = number, int(reads.offer[read]), float(reads.wanted[read]), distance, target
        start = near.first[read]
        senders = tuple(sender[start:start + near.count[read]].tolist())
        batches.append(_Batch(key, (number, target, distance, *corner), members, size, senders, bool(crosses[read])))
    return batches


def _sums(ids, values):
    totals = np.zeros(int(ids.max()) + 1 if len(ids) else 0, np.int64)
    np.add.at(totals, ids, values)
    return totals.tolist()


def _deal(batch, loads):
    """How many of a batch's reads each holder serves: int64[holders]. Ties go to the node that sends less."""
    present = np.array([loads.process[process] for process in batch.senders], np.int64)
    whole = np.maximum(_level(present, batch.members * batch.size) - present, 0) // batch.size
    counts = whole.astype(np.int64)
    level = present + counts * batch.size
    distinct, node = np.unique([loads.node_of(process) for process in batch.senders], return_inverse=True)
    across = np.array([loads.node[one] for one in distinct.tolist()], np.int64)
    np.add.at(across, node, counts * batch.size)
    # Holders of one node that are level come one after the other, as if each had been served already.
    alike, _ = row_ids(level, node)
    order = np.argsort(alike, kind='stable')
    turn = np.empty(len(order), np.int64)
    turn[order] = np.arange(len(order)) - np.searchsorted(alike[order], alike[order])
    order = np.lexsort((across[node] + turn * batch.size, level))
    counts[order[:batch.members - int(counts.sum())]] += 1
    return counts


def _level(present, amount):
    """The height to which all fill up if ``amount`` is poured over them, rounded down."""
    level = np.sort(present)
    # Once the lowest k are level, this much has been poured.
    poured = level * np.arange(1, len(level) + 1) - np.cumsum(level)
    filled = int(np.searchsorted(poured, amount, 'right'))
    return (amount + int(level[:filled].sum())) // filled


def _report(batches, loads, forced_process, forced_node):
    by_process, by_node = defaultdict(int), defaultdict(int)
    for batch in batches:
        by_process[frozenset(batch.senders)] += batch.members * batch.size
        if batch.crosses:
            by_node[frozenset(map(loads.node_of, batch.senders))] += batch.members * batch.size
    return BalanceReport(max(loads.process.values(), default=0), _bound(by_process, forced_process),
                         max(loads.node.values(), default=0), _bound(by_node, forced_node))


def _bound(totals, forced):
    """Bytes that some sender sends whatever is chosen: the mean over any set of senders that must do it alone."""
    bound = max(forced.values(), default=0)
    if totals:
        totals = {**totals, frozenset().union(*totals): sum(totals.values())}
    for senders, total in totals.items():
        bound = max(bound, -(-(total + sum(forced.get(sender, 0) for sender in senders)) // len(senders)))
    return bound
