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

from deepspeed.checkpoint.affine_transfer.assemble import segment_columns, shard_numels
from deepspeed.checkpoint.affine_transfer.budget import PlanBudget, PlanStatistics
from deepspeed.checkpoint.affine_transfer.errors import InvalidReplicaPolicyError
from deepspeed.checkpoint.affine_transfer.meetings import compose_maps, reads_of
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer.replicas import POLICIES, Topology, ask, without_rescaling
from deepspeed.checkpoint.affine_transfer.requests import Requests


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

    The target comes first here; in the executor and in ``TransferEndpoints`` the source does. Swapped maps can be a
    valid plan of the opposite move, which no check can see; name the arguments.

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
    >>> plan_transfer(target_map=columns, source_map=rows).segments[1]
    TransferSegment(source_rank=1, source_offset=0, source_strides=(4, 1), target_rank=0, target_offset=4, \
target_strides=(2, 1), shape=(2, 2))
    """
    budget = limits or PlanBudget()
    choose = _policy(replica_selector, replica_policy)
    source, target, meetings = compose_maps(target_map, source_map, budget, partial_targets)
    reads = reads_of(source, target, meetings)
    if scale_power != 1:
        reads = without_rescaling(reads)
    ndim = len(target_map.logical_shape)
    chosen = choose(reads, Topology(endpoints), Requests(source, target, meetings, ndim))
    columns = segment_columns(source, target, meetings, chosen, ndim, budget)
    return _plan(source, target, len(chosen), columns, target_map.logical_shape)


def _policy(selector, name):
    """The function ``(reads, topology, requests) -> blocks`` of a policy."""
    if selector is not None:
        return lambda reads, topology, requests: ask(selector, reads, requests.order(), requests.make)
    if name not in POLICIES:
        raise InvalidReplicaPolicyError(
            f'replica_policy is {name!r}; the named policies are {sorted(POLICIES)}, and a '
            'callable goes to replica_selector')
    return lambda reads, topology, requests: POLICIES[name](reads, topology, 1)[0]


def _plan(source, target, joined, columns, logical_shape):
    statistics = PlanStatistics(source_pieces=len(source.regions.holders),
                                target_pieces=len(target.blocks.shard),
                                pair_checks=joined,
                                segments_before_merge=joined,
                                segments=len(columns),
                                plan_bytes=columns.nbytes)
    return TransferPlan.from_columns(columns, logical_shape, shard_numels(source.columns),
                                     shard_numels(target.columns), statistics)
