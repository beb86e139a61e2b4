# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which of several holders a target reads.

A choice is made per *read*: one region of the parameter that one target shard takes. The named policies
are closed rules over columns, the same on every process. A callable is asked once per read that leaves a
choice, with the same requests as in DeepSpeed.
"""

from dataclasses import dataclass
from typing import Tuple

import numpy as np

from deepspeed.checkpoint.affine_geometry.columns import expand_ranges, row_ids
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
        target_rank: int64[R], location id. holders: int64[R], id of the set of locations that hold the region.
        read: int64[C], which read a candidate is for, ascending. block: int64[C], the candidate's source block.
        source_rank: int64[C], location id, ascending within a read.
        same_scale: bool[C], whether the candidate holds the region by the factor that the target wants.
    """
    target_rank: np.ndarray
    holders: np.ndarray
    read: np.ndarray
    block: np.ndarray
    source_rank: np.ndarray
    same_scale: np.ndarray

    def take(self, kept):
        return Reads(self.target_rank, self.holders, self.read[kept], self.block[kept], self.source_rank[kept],
                     self.same_scale[kept])


def gather_reads(target_rank, regions, region, location_ids, source_blocks, target_scale):
    """List the candidates of reads: read k takes ``region[k]`` into a shard of ``target_rank[k]``."""
    read, at = expand_ranges(regions.starts[region], regions.starts[region + 1])
    block = regions.blocks[at]
    return Reads(target_rank, regions.holders[region], read, block, location_ids[source_blocks.shard[block]],
                 source_blocks.scale[block] == target_scale[read])


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


def first_holder(reads, endpoints):
    """The holder with the lowest location id, but one of the target's own scale before any other."""
    return _first(reads, np.where(reads.same_scale, 0, 1))


def local_first_least_loaded(reads, endpoints):
    """The target's own process before any other; else holders take turns.

    The targets that read from one set of holders are numbered in the order of their location ids, and the k-th of
    them starts at the k-th holder. That spreads equal reads evenly and needs no running total.
    """
    if endpoints is None:
        raise InvalidReplicaPolicyError('local_first_least_loaded needs endpoints: pass TransferEndpoints(source, '
                                        'target), which say the process of every location')
    near = endpoints.source_processes(reads.source_rank) == endpoints.target_processes(reads.target_rank)[reads.read]
    count = np.bincount(reads.read, minlength=len(reads.target_rank))
    position = np.arange(len(reads.read)) - (np.cumsum(count) - count)[reads.read]
    turn = _turns(reads)[reads.read]
    away = (position - turn) % count[reads.read]
    return _first(reads, np.where(near, 0, 1 + np.where(reads.same_scale, 0, count.max(initial=0)) + away))


def _turns(reads):
    """Each read's target as its place among the targets that read from the same holders: int64[R]."""
    pair, first = row_ids(reads.holders, reads.target_rank)
    holders = reads.holders[first]
    return (np.arange(len(first)) - np.searchsorted(holders, holders))[pair]


def _first(reads, penalty):
    """The block of the least penalised candidate of every read, the earliest among equals."""
    order = np.lexsort((penalty, reads.read))
    reads_of = reads.read[order]
    starts = np.concatenate([[True], reads_of[1:] != reads_of[:-1]]) if len(order) else np.zeros(0, bool)
    return reads.block[order[starts]]


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
