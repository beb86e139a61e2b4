# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Compose two maps of one parameter into copies from shard to shard.

The plan is exact by construction, and every premise of the construction is proved by sorting:

1. no address of a source shard is used by two pieces, and every target shard is filled once (addresses);
2. the source's regions are disjoint, fill the parameter, and are held by exactly the locations named
   (regions); so each target block is the disjoint union of its meetings with regions;
3. a meeting is a box, and box coordinates step through either shard with the strides of the pieces
   around it; so each meeting is one strided copy.

Nothing here looks at an element or compares every piece with every other.
"""

from dataclasses import dataclass

import numpy as np

from deepspeed.checkpoint.affine_geometry.columns import row_ids
from deepspeed.checkpoint.affine_geometry.merge import BlockPairs, MergeLimitError, merge_blocks
from deepspeed.checkpoint.affine_transfer.budget import PlanBudget, PlanStatistics
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError, InvalidReplicaPolicyError
from deepspeed.checkpoint.affine_transfer.meetings import Meetings, Side, compose_maps, reads_of
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer.replicas import (POLICIES, ReplicaCandidate, ReplicaSelectionRequest, ask,
                                                           without_rescaling)
from deepspeed.checkpoint.affine_transfer.segments import SegmentColumns


def plan_transfer(target_map,
                  source_map,
                  limits=None,
                  *,
                  replica_selector=None,
                  replica_policy='first_holder',
                  endpoints=None,
                  scale_power=None,
                  partial_targets=False):
    """Plan the copies that fill the shards of ``target_map`` from shards laid out by ``source_map``.

    Args:
        target_map, source_map: ``ParamAffineMap`` of equal logical shape; nothing else ties them to one parameter.
        limits: ``PlanBudget``. A plan that needs more is refused, never shortened.
        replica_selector: a callable that chooses among the holders of a region, see ``ReplicaSelectionRequest``.
        replica_policy: the name of a policy instead: ``first_holder`` or ``local_first_least_loaded``.
        endpoints: ``TransferEndpoints``, for policies that ask where a location is.
        scale_power: how scales apply to the tensor that moves. None: it is copied as it is, so regions must be held
            by the factor at which the target wants them. 1: a parameter, which is divided by the source's scale and
            multiplied by the target's where they differ. Other powers, which are those of optimizer moments, are
            refused where scales differ.
        partial_targets: allow target shards that hold more than the map describes, and a target map that describes
            a part of the parameter; what is not described is not written.

    Returns:
        ``TransferPlan``: it writes every address that the target map describes once, from a location that holds it.

    Raises:
        InvalidMapError: a map that contradicts itself or the other, or leaves a needed element out.
        UnsupportedLayoutError: a truthful layout that is no set of boxes, or scales that do not cancel.
        InvalidReplicaPolicyError: an unknown policy, or one that chose a location which does not hold the region.
        AffineTransferError: a budget that is exhausted; the message names it.

    >>> from deepspeed.checkpoint.affine.constructors import contiguous_split_map
    >>> rows, columns = contiguous_split_map((4, 4), [2, 2], 0), contiguous_split_map((4, 4), [2, 2], 1)
    >>> plan_transfer(columns, rows).segments[1]
    TransferSegment(source_rank=1, source_offset=0, source_strides=(4, 1), target_rank=0, target_offset=4, \
target_strides=(2, 1), shape=(2, 2))
    """
    budget = limits or PlanBudget()
    choose = _policy(replica_selector, replica_policy)
    source, target, meetings = compose_maps(target_map, source_map, budget, partial_targets)
    reads = reads_of(source, target, meetings)
    if scale_power != 1:
        reads = without_rescaling(reads)
    chosen = choose(reads, endpoints, _Requests(source, target, meetings, len(target_map.logical_shape)))
    return _finish(source, target, meetings, chosen, target_map.logical_shape, budget)


def _policy(selector, name):
    """The function ``(reads, endpoints, requests) -> blocks`` of a policy."""
    if selector is not None:
        return lambda reads, endpoints, requests: ask(selector, reads, requests.order(), requests.make)
    if name not in POLICIES:
        raise InvalidReplicaPolicyError(
            f'replica_policy is {name!r}; the named policies are {sorted(POLICIES)}, and a '
            'callable goes to replica_selector')
    return lambda reads, endpoints, requests: POLICIES[name](reads, endpoints)


@dataclass(frozen=True)
class _Requests:
    """Makes the requests that a callable policy is asked."""
    source: Side
    target: Side
    meetings: Meetings
    ndim: int

    def order(self):
        """Targets by location and place in the parameter, and for each its regions by their place."""
        blocks, regions, at = self.target.blocks, self.source.regions, self.meetings
        rank = self.target.columns.location_ids[blocks.shard[at.target]]
        keys = [rank, *blocks.lower[at.target].T, *blocks.extent[at.target].T, *regions.lower[at.region].T]
        return np.lexsort(keys[::-1])

    def make(self, read, candidates):
        ndim = self.ndim
        row = np.array([read])
        own = self.meetings.part(self.target.blocks, self.meetings.target[row], row)
        held = self.meetings.part(self.source.blocks, candidates, np.repeat(row, len(candidates)))
        ranks = self.source.columns.location_ids[self.source.blocks.shard[candidates]].tolist()
        return ReplicaSelectionRequest(
            target_rank=int(self.target.columns.location_ids[own.shard[0]]),
            logical_origin=tuple(own.lower[0, :ndim].tolist()),
            shape=tuple(own.extent[0, :ndim].tolist()),
            target_offset=int(own.offset[0]),
            target_strides=tuple(own.strides[0, :ndim].tolist()),
            candidates=tuple(
                ReplicaCandidate(rank, offset, tuple(strides[:ndim]))
                for rank, offset, strides in zip(ranks, held.offset.tolist(), held.strides.tolist())))


def _finish(source, target, meetings, chosen, logical_shape, budget):
    """Make the copies, join those that continue each other, and put them in the order of their targets."""
    at = np.arange(len(chosen))
    read, written = meetings.part(source.blocks, chosen, at), meetings.part(target.blocks, meetings.target, at)
    rescaled = read.scale != written.scale
    source_scale, target_scale = np.where(rescaled, read.scale, 1.0), np.where(rescaled, written.scale, 1.0)
    kind, _ = row_ids(read.shard, written.shard, source_scale.view(np.int64), target_scale.view(np.int64))
    pairs = BlockPairs(kind, read.extent, read.offset, read.strides, written.offset, written.strides, at)
    try:
        merged = merge_blocks(pairs, budget.max_merge_passes, budget.max_merge_checks)
    except MergeLimitError as error:
        raise AffineTransferError(f'{error.checks} comparisons of segments exceed max_merge_checks '
                                  f'{budget.max_merge_checks}') from None
    target_rank = target.columns.location_ids[written.shard[merged.row]]
    order = np.lexsort((merged.second, target_rank))
    merged, ndim = merged.take(order), len(logical_shape)
    columns = SegmentColumns(source_rank=source.columns.location_ids[read.shard[merged.row]],
                             source_offset=merged.first,
                             source_strides=merged.first_strides[:, :ndim],
                             target_rank=target_rank[order],
                             target_offset=merged.second,
                             target_strides=merged.second_strides[:, :ndim],
                             shape=merged.extent[:, :ndim],
                             source_scale=source_scale[merged.row],
                             target_scale=target_scale[merged.row])
    return _within_budget(source, target, len(at), columns, logical_shape, budget)


def _within_budget(source, target, joined, columns, logical_shape, budget):
    """The plan, unless it is larger than allowed."""
    if len(columns) > budget.max_segments:
        raise AffineTransferError(f'{len(columns)} segments exceed max_segments {budget.max_segments}')
    if columns.nbytes > budget.max_plan_bytes:
        raise AffineTransferError(f'{columns.nbytes} bytes of segments exceed max_plan_bytes {budget.max_plan_bytes}')
    statistics = PlanStatistics(source_pieces=len(source.regions.holders),
                                target_pieces=len(target.blocks.shard),
                                pair_checks=joined,
                                segments_before_merge=joined,
                                segments=len(columns),
                                plan_bytes=columns.nbytes)
    return TransferPlan.from_columns(columns, logical_shape, _numels(source), _numels(target), statistics)


def _numels(side):
    """Elements of every shard by its location."""
    columns = side.columns
    return dict(zip(columns.location_ids[:columns.shard_count].tolist(), columns.shard_numel.tolist()))
