# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which of several holders a target reads.

A choice is made per *read*: one region of the parameter that one target shard takes. The named policies
are closed rules over columns, the same on every process. A callable is asked once per read that leaves a
choice, with the same requests as in DeepSpeed.
"""

import math
from dataclasses import dataclass
from typing import Mapping, Optional, Tuple

import numpy as np

from deepspeed.checkpoint.affine.checks import listed, mapping, shown
from deepspeed.checkpoint.affine_geometry.columns import expand_ranges, row_ids
from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.errors import InvalidReplicaPolicyError, UnsupportedLayoutError


@dataclass(frozen=True)
class ReplicaCandidate:
    """A holder of a region: its location, and where the region starts and how it steps in its shard (elements)."""
    source_rank: int
    source_offset: int
    source_strides: Tuple[int, ...]


@dataclass(frozen=True)
class ReplicaSelectionRequest:
    """One read, for a policy to choose its holder: it returns the ``source_rank`` of a candidate.

    Attributes:
        target_rank: the location that reads.
        logical_origin, shape: the region, in coordinates of the parameter.
        target_offset, target_strides: where it goes in the target's shard, in elements.
        candidates: the holders, ascending by location.
    """
    target_rank: int
    logical_origin: Tuple[int, ...]
    shape: Tuple[int, ...]
    target_offset: int
    target_strides: Tuple[int, ...]
    candidates: Tuple[ReplicaCandidate, ...]


@dataclass(frozen=True)
class Reads:
    """R reads and the blocks that they could be served from.

    Attributes:
        target_rank: int64[R], location id. wanted: float64[R], the factor by which the target holds the region.
        offer: int64[R]; reads with equal numbers have the same holders, each by the same factor.
        read: int64[C], which read a candidate is for, ascending. block: int64[C], the candidate's source block.
        source_rank: int64[C], location id, ascending within a read.
        same_scale: bool[C], whether the candidate holds the region by the factor that the target wants.
    """
    target_rank: np.ndarray
    wanted: np.ndarray
    offer: np.ndarray
    read: np.ndarray
    block: np.ndarray
    source_rank: np.ndarray
    same_scale: np.ndarray

    def take(self, kept):
        return Reads(self.target_rank, self.wanted, self.offer, self.read[kept], self.block[kept],
                     self.source_rank[kept], self.same_scale[kept])


def gather_reads(target_rank, source, region, location_ids, wanted):
    """List the candidates of reads: read k takes ``region[k]`` of ``source`` into a shard of ``target_rank[k]``."""
    regions, blocks = source.regions, source.blocks
    read, at = expand_ranges(regions.starts[region], regions.starts[region + 1])
    block = regions.blocks[at]
    source_rank = location_ids[blocks.shard[block]]
    # Regions list holders in the order of the ids that they were proved with; these may be others.
    if ((source_rank[1:] < source_rank[:-1]) & (read[1:] == read[:-1])).any():
        order = np.lexsort((source_rank, read))
        block, source_rank = block[order], source_rank[order]
    return Reads(target_rank, wanted, source.offers[region], read, block, source_rank,
                 blocks.scale[block] == wanted[read])


def without_rescaling(reads):
    """Leave only candidates that hold the region by the target's own factor.

    Raises:
        UnsupportedLayoutError: a read that has none.
    """
    if reads.same_scale.all():
        return reads
    reads = reads.take(reads.same_scale)
    served = np.bincount(reads.read, minlength=len(reads.target_rank)) > 0
    if not served.all():
        rank = int(reads.target_rank[np.argmin(served)])
        raise UnsupportedLayoutError(
            f'target rank {rank} holds a region by another scale than every source rank that has it. A parameter is '
            'rescaled on request: pass scale_power=1. Optimizer states are not, because learning rate and epsilon '
            'would have to move into the other coordinate too')
    return reads


# Node ids are folded into the numbers of distances.
_MOST_NODES = 2**31


@dataclass(frozen=True)
class Topology:
    """Where locations are: ``endpoints`` (location to process) and ``nodes`` (process to node), or None if unknown."""
    endpoints: Optional[TransferEndpoints] = None
    nodes: Optional[Mapping] = None

    def __post_init__(self):
        for process, node in {} if self.nodes is None else mapping(self.nodes, 'nodes').items():
            if type(process) is not int or type(node) is not int or not 0 <= node < _MOST_NODES:
                raise InvalidReplicaPolicyError(
                    f'nodes has {shown(process)}: {shown(node)}; expected a process and its '
                    'node, ints from 0 up and below 2**31')

    def processes(self, reads):
        """The process of every candidate, int64[C], and of every target, int64[R]."""
        if not isinstance(self.endpoints, TransferEndpoints):
            raise InvalidReplicaPolicyError('this replica policy needs endpoints: pass TransferEndpoints(source, '
                                            'target), which say the process of every location')
        return (self.endpoints.source_processes(reads.source_rank), self.endpoints.target_processes(reads.target_rank))

    def nodes_of(self, processes):
        """The node of processes, int64[n]; without nodes every process is alone on one."""
        if self.nodes is None:
            return processes
        distinct, where = np.unique(processes, return_inverse=True)
        missing = [process for process in distinct.tolist() if process not in self.nodes]
        if missing:
            raise InvalidReplicaPolicyError(f'nodes does not say the node of processes {listed(missing)}')
        return np.array([self.nodes[process] for process in distinct.tolist()], np.int64)[where]


def first_holder(reads, topology, members):
    """The holder with the lowest location id, but one of the target's own scale before any other."""
    return _first(reads, np.where(reads.same_scale, 0, 1))[None]


def local_first_least_loaded(reads, topology, members):
    """The target's own process before its node, and that before any other; among equals, holders take turns.

    The n targets that read from one set of holders at one distance are numbered in the order of their location ids.
    In the parameter with number ``phase`` among those of equal maps the k-th of them reads from holder
    ``k + phase * n``, and each time these starts come round, one further. Over as many parameters as there are
    holders, every target reads from every holder once. That spreads reads evenly over a model, whatever their sizes,
    and needs no running total, so every process finds the same answer for the reads that it knows.
    """
    near = nearest(reads, topology)
    place, readers = _turns(near.reads, near.distance)
    # After as many parameters as any number of holders divides, all turns repeat.
    period = min(members, math.lcm(*np.unique(near.count).tolist()))
    phase = np.arange(period)[:, None]
    common = np.gcd(readers, near.count)
    turns = place + phase * readers + phase // (near.count // common) % common
    return near.reads.block[near.first + turns % near.count]


@dataclass(frozen=True)
class Nearest:
    """Reads with only their nearest candidates, one for each process.

    Attributes:
        reads: as ``Reads``. first, count: int64[R], where a read's candidates start, and how many it has.
        distance: int64[R], one number per kind of distance (own process, each own node, elsewhere) and of scale (the
            target's own, another). Reads of one offer, one wanted factor and one distance have the same candidates.
        local: bool[R], whether the target's own process holds the region.
    """
    reads: Reads
    first: np.ndarray
    count: np.ndarray
    distance: np.ndarray
    local: np.ndarray


def nearest(reads, topology):
    """Leave the candidates that are nearest to their target; of those, the ones of its own scale if there are any."""
    source, target = topology.processes(reads)
    here, there = topology.nodes_of(source), topology.nodes_of(target)
    far = np.where(source == target[reads.read], 0, np.where(here == there[reads.read], 1, 2))
    rank = 2 * far + np.where(reads.same_scale, 0, 1)
    starts = np.searchsorted(reads.read, np.arange(len(target)))
    best = np.minimum.reduceat(rank, starts) if len(target) else rank
    kept = np.flatnonzero(rank == best[reads.read])
    # Which of its copies a process sends makes no difference to what it sends.
    _, first = row_ids(reads.read[kept], source[kept])
    kept = reads.take(np.sort(kept[first]))
    count = np.bincount(kept.read, minlength=len(target))
    # Reads from one's own node are dealt out among that node's targets alone.
    distance = 2 * np.where(best // 2 == 1, 3 + there, best // 2) + best % 2
    return Nearest(kept, np.cumsum(count) - count, count, distance, best // 2 == 0)


def same_candidates(reads, distance):
    """Number reads so that equal numbers mean equal candidates, and the first read of each number: see ``row_ids``."""
    return row_ids(reads.offer, distance, reads.wanted.view(np.int64))


def _turns(reads, distance):
    """Each read's place among the readers of its holders, and how many these are: int64[R] each."""
    group, _ = same_candidates(reads, distance)
    reader, first = row_ids(group, reads.target_rank)
    group = group[first]
    place = np.arange(len(first)) - np.searchsorted(group, group)
    readers = np.bincount(group)
    return place[reader], readers[group][reader]


def _first(reads, penalty):
    """The block of the least penalised candidate of every read, the earliest among equals."""
    order = np.lexsort((penalty, reads.read))
    reads_of = reads.read[order]
    starts = np.concatenate([[True], reads_of[1:] != reads_of[:-1]]) if len(order) else np.zeros(0, bool)
    return reads.block[order[starts]]


# Called with reads, topology and the number of parameters that make these reads. The parameter with number k takes its
# blocks from row k, modulo the number of rows, of the int64[rows, R] that is returned.
POLICIES = {'first_holder': first_holder, 'local_first_least_loaded': local_first_least_loaded}


def ask(selector, reads, order, describe):
    """Ask a callable about every read that leaves a choice.

    Args:
        selector: called with a ``ReplicaSelectionRequest``, returns the location of a candidate, an ``int``.
        order: int64[R], in which order to ask.
        describe: makes the request for a read and its candidate blocks.

    Raises:
        InvalidReplicaPolicyError: anything else returned.
    """
    starts = np.searchsorted(reads.read, np.arange(len(reads.target_rank) + 1))
    chosen = reads.block[starts[:-1]]
    for read in order.tolist():
        candidates = slice(int(starts[read]), int(starts[read + 1]))
        if candidates.stop - candidates.start < 2:
            continue
        ranks = reads.source_rank[candidates].tolist()
        rank = selector(describe(read, reads.block[candidates]))
        if type(rank) is not int or rank not in ranks:
            raise InvalidReplicaPolicyError(f'the replica policy returned {rank!r} for target rank '
                                            f'{int(reads.target_rank[read])}, which is not one of the source ranks '
                                            f'{ranks} that hold the region; return one of them as an int')
        chosen[read] = reads.block[candidates][ranks.index(rank)]
    return chosen
