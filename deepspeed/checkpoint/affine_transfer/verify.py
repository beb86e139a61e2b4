# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Prove a plan that somebody else made, or that was read from a file, against both maps.

The maps alone say where every address of a target shard may be filled from: the meetings of target blocks
and source regions. Meetings and segments are both sets of target addresses, seen as boxes of digits, so
they are joined like any boxes. Where a segment lies over a meeting, both give the source address as a
function of the target address that is affine in the digits. Two such functions are equal on a box if they
agree at one corner and at one step from it along each digit.
"""

from dataclasses import dataclass, replace

import numpy as np

from deepspeed.checkpoint.affine_geometry.addresses import (AddressCollisionError, AddressLayoutError, address_boxes,
                                                            check_addresses_apart, split_dense_axes)
from deepspeed.checkpoint.affine_geometry.join import PairLimitError, overlapping_pairs
from deepspeed.checkpoint.affine_transfer.budget import PlanBudget
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError, InvalidMapError, UnsupportedLayoutError
from deepspeed.checkpoint.affine_transfer.meetings import compose_maps, reads_of


def check_plan(plan, target_map, source_map, limits=None, *, partial_targets=False):
    """Raise unless a plan writes every target address once, from a location that holds that element.

    Which of several holders is read, and how the copies are cut, is the plan's choice.

    Args:
        plan: ``TransferPlan``. The other arguments are those of ``plan_transfer``.

    Raises:
        InvalidMapError: a map that contradicts itself, or a plan that does not do what the maps ask for.
        UnsupportedLayoutError: segments whose addresses cannot be seen as boxes; nothing is proved about them.
    """
    if plan.logical_shape != target_map.logical_shape:
        raise InvalidMapError(
            f'the plan moves a parameter of shape {plan.logical_shape}, the maps describe one of shape '
            f'{target_map.logical_shape}')
    budget = limits or PlanBudget()
    source, target, meetings = compose_maps(target_map, source_map, budget, partial_targets)
    reads = reads_of(source, target, meetings)
    columns = plan.columns
    written = meetings.part(target.blocks, meetings.target, np.arange(len(meetings.target)))
    # Summed as Python ints: a hostile plan may claim more than int64 holds.
    moved, wanted = sum(columns.numel.tolist()), sum(written.extent.prod(axis=1).tolist())
    if moved != wanted:
        raise InvalidMapError(f'the plan writes {moved} elements, the target shards take {wanted}')
    if not len(columns):
        return
    overlaps = _overlaps(columns, reads.target_rank, written, budget)
    candidate = _candidates(columns, reads, overlaps)
    read = meetings.part(source.blocks, reads.block[candidate], overlaps.meeting)
    _check_scales(columns, overlaps, read, written)
    _check_addresses(columns, overlaps, read, written.take(overlaps.meeting))


# Segments of a truthful plan meet only themselves; this many more meetings are looked at to name two that collide.
_TANGLE_LIMIT = 1 << 20


@dataclass(frozen=True)
class _Overlaps:
    """Where segments lie over meetings: int64[K]; target address of the first element, and steps int64[K, D].

    A step is the distance to the next element along a digit, or 0 where the overlap has only one index there.
    """
    segment: np.ndarray
    meeting: np.ndarray
    address: np.ndarray
    steps: np.ndarray


def _overlaps(columns, target_rank, written, budget):
    """Join segments and meetings by target address; together they must be the same addresses."""
    limit = _TANGLE_LIMIT + len(columns) + len(target_rank)
    try:
        check_addresses_apart(columns.target_rank, columns.target_offset, columns.shape, columns.target_strides, limit)
        boxes = _boxes(columns, target_rank, written)
        ours = boxes.block < len(columns)
        mine, theirs = np.flatnonzero(ours), np.flatnonzero(~ours)
        i, j = overlapping_pairs(boxes.lower[mine], boxes.upper[mine], boxes.lower[theirs], boxes.upper[theirs],
                                 boxes.span[mine], boxes.span[theirs], max(limit, budget.max_pair_checks))
    except AddressCollisionError as error:
        raise InvalidMapError(f'plan segments {error.blocks} write the same target addresses') from None
    except AddressLayoutError as error:
        raise UnsupportedLayoutError(f'the plan cannot be proved: {error}') from None
    except PairLimitError as error:
        raise AffineTransferError(f'plan segments meet target pieces {error.count} times; proving that exceeds '
                                  f'max_pair_checks {error.limit}') from None
    i, j = mine[i], theirs[j]
    lower, upper = np.maximum(boxes.lower[i], boxes.lower[j]), np.minimum(boxes.upper[i], boxes.upper[j])
    if int((upper - lower).prod(axis=1).sum()) != int(columns.numel.sum()):
        missed = np.bincount(boxes.block[i], weights=(upper - lower).prod(axis=1), minlength=len(columns))
        bad = int(np.argmax(missed[:len(columns)] < columns.numel))
        raise InvalidMapError(
            f'plan segment {bad} ({columns.segment(bad)}) writes target addresses that the target map '
            'does not describe')
    steps = boxes.strides[boxes.span[i]]
    address = boxes.start[boxes.span[i]] + (lower * steps).sum(axis=1)
    return _Overlaps(boxes.block[i], boxes.block[j] - len(columns), address, np.where(upper - lower > 1, steps, 0))


def _boxes(columns, target_rank, written):
    """Target addresses of all segments and then of all meetings as boxes; ``block`` numbers them in that order."""
    axes = max(columns.ndim, written.extent.shape[1])
    rank = np.concatenate([columns.target_rank, target_rank])
    offset = np.concatenate([columns.target_offset, written.offset])
    extent = _stack(columns.shape, written.extent, axes, 1)
    strides = _stack(columns.target_strides, written.strides, axes, 0)
    try:
        return address_boxes(rank, offset, extent, strides)
    except AddressLayoutError:
        # Strides may divide each other only once rows that continue each other count as one. Source addresses
        # need not continue there, so the rows are taken apart instead of joined.
        owner, offset, extent = split_dense_axes(offset, extent, strides, _TANGLE_LIMIT + len(rank))
        boxes = address_boxes(rank[owner], offset, extent, strides[owner])
        return replace(boxes, block=owner[boxes.block])


def _stack(one, other, axes, fill):
    widths = [((0, 0), (0, axes - table.shape[1])) for table in (one, other)]
    return np.concatenate([np.pad(table, width, constant_values=fill) for table, width in zip((one, other), widths)])


def _candidates(columns, reads, overlaps):
    """The candidate of each overlap that is the segment's source: its number in ``reads``."""
    # Candidates are sorted by read and, within it, by location.
    ranks, where = np.unique(reads.source_rank, return_inverse=True)
    key = reads.read * len(ranks) + where
    rank = columns.source_rank[overlaps.segment]
    known = np.minimum(np.searchsorted(ranks, rank), len(ranks) - 1)
    wanted = overlaps.meeting * len(ranks) + known
    at = np.minimum(np.searchsorted(key, wanted), len(key) - 1)
    wrong = np.flatnonzero((key[at] != wanted) | (ranks[known] != rank))
    if len(wrong):
        bad = int(overlaps.segment[wrong[0]])
        raise InvalidMapError(f'plan segment {bad} ({columns.segment(bad)}) reads source rank '
                              f'{columns.source_rank[bad]}, which does not hold what the target takes there')
    return at


def _check_scales(columns, overlaps, read, written):
    source, target = read.scale, written.scale[overlaps.meeting]
    rescaled = source != target
    wrong = columns.source_scale[overlaps.segment] != np.where(rescaled, source, 1.0)
    wrong |= columns.target_scale[overlaps.segment] != np.where(rescaled, target, 1.0)
    if wrong.any():
        bad = int(overlaps.segment[np.argmax(wrong)])
        raise InvalidMapError(f'plan segment {bad} ({columns.segment(bad)}) has other scales than the maps')


def _check_addresses(columns, overlaps, read, written):
    """Compare the source addresses that segments and maps give, at the first element and one step along each digit."""
    row = overlaps.segment
    segment = (columns.target_offset[row], columns.shape[row], columns.target_strides[row], columns.source_offset[row],
               columns.source_strides[row])
    truth = (written.offset, written.extent, written.strides, read.offset, read.strides)
    for step in [np.zeros(len(row), np.int64), *overlaps.steps.T]:
        wrong = _source_address(overlaps.address + step, *segment) != _source_address(overlaps.address + step, *truth)
        if wrong.any():
            bad = int(row[np.argmax(wrong)])
            raise InvalidMapError(f'plan segment {bad} ({columns.segment(bad)}) reads other elements than the target '
                                  'takes there')


def _source_address(address, target_offset, extent, target_strides, source_offset, source_strides):
    """Where blocks read what they write at a target address of theirs: int64[K]."""
    target_strides = np.where(extent > 1, target_strides, 0)
    order = np.argsort(-target_strides, axis=1, kind='stable')
    rest, result = address - target_offset, source_offset.copy()
    for place in range(order.shape[1]):
        axis = order[:, place]
        stride = target_strides[np.arange(len(axis)), axis]
        index = np.where(stride > 0, rest // np.maximum(stride, 1), 0)
        rest = rest - index * stride
        result += index * source_strides[np.arange(len(axis)), axis]
    return result
