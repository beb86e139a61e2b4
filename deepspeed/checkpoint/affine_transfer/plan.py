# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A plan: the copies that bring one parameter from one layout into another."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Dict, Optional, Sequence, Tuple

import numpy as np

from deepspeed.checkpoint.affine.checks import MAX_ELEMENTS, span
from deepspeed.checkpoint.affine.views import ReadOnlyMapping
from deepspeed.checkpoint.affine_transfer import parsing
from deepspeed.checkpoint.affine_transfer.budget import PlanBudget, PlanStatistics
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError, InvalidMapError
from deepspeed.checkpoint.affine_transfer.segments import SegmentColumns, SegmentView, TransferSegment
from deepspeed.checkpoint.affine_transfer.verify import check_plan


@dataclass(frozen=True)
class TransferPlan:
    """Segments in target order, with buffer sizes and planning counts.

    Args:
        segments: the copies; any sequence of TransferSegment. Plans of the planner keep columns and make
            these objects on access.
        logical_shape: shape of the full parameter.
        moved_elements: elements that all segments move together.
        statistics: what the planner looked at.
        source_numel: source location -> elements that its buffer must have, empty shards too. Empty where
            it is not known (a plan that another program wrote).
        target_numel: target location -> elements that its buffer must have.

    Example::

        plan = plan_transfer(target_map, source_map)
        plan.segments[0].shape
        TransferPlan.from_dict(plan.to_dict(), target_map, source_map) == plan
    """
    segments: Sequence[TransferSegment]
    logical_shape: Tuple[int, ...]
    moved_elements: int
    statistics: PlanStatistics
    source_numel: Mapping = field(default_factory=dict)
    target_numel: Mapping = field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.segments, SegmentView):
            object.__setattr__(self, 'segments', tuple(self.segments))
        object.__setattr__(self, 'logical_shape', tuple(self.logical_shape))
        for name in ('source_numel', 'target_numel'):
            if not isinstance(getattr(self, name), ReadOnlyMapping):
                object.__setattr__(self, name, ReadOnlyMapping(getattr(self, name)))

    def __eq__(self, other) -> bool:
        """Whether both plans make the same copies; how they were found (statistics) does not matter."""
        if not isinstance(other, TransferPlan):
            return NotImplemented
        return (self.logical_shape == other.logical_shape and self.segments == other.segments
                and self.source_numel == other.source_numel and self.target_numel == other.target_numel)

    def __hash__(self) -> int:
        return hash((self.logical_shape, len(self.segments)))

    @classmethod
    def from_columns(cls,
                     columns: SegmentColumns,
                     logical_shape: Sequence[int],
                     source_numel: Mapping,
                     target_numel: Mapping,
                     statistics: Optional[PlanStatistics] = None) -> 'TransferPlan':
        """A plan over columns; without ``statistics`` it has the figures of the segments alone."""
        if statistics is None:
            statistics = PlanStatistics(0, 0, 0, len(columns), len(columns), columns.nbytes)
        return cls(SegmentView(columns), tuple(logical_shape), int(columns.numel.sum()), statistics, source_numel,
                   target_numel)

    @cached_property
    def columns(self) -> SegmentColumns:
        """The segments as arrays.

        Raises:
            AffineTransferError: the plan was made from segment objects that differ in their number of axes.
        """
        if isinstance(self.segments, SegmentView):
            return self.segments.columns
        return SegmentColumns.from_segments(self.segments, ndim=len(self.logical_shape))

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.logical_shape)

    def to_dict(self) -> Dict[str, list]:
        """Plain ints and lists (floats where segments are scaled).

        ``logical_shape`` and ``segments`` are what DeepSpeed writes; the buffers' sizes stand beside them
        as lists of ``[location, elements]``.
        """
        return {
            'logical_shape': list(self.logical_shape),
            'segments': [segment.to_dict() for segment in self.segments],
            'source_numel': [[location, numel] for location, numel in sorted(self.source_numel.items())],
            'target_numel': [[location, numel] for location, numel in sorted(self.target_numel.items())],
        }

    @classmethod
    def from_dict(cls,
                  entry: Dict[str, list],
                  target_map=None,
                  source_map=None,
                  *,
                  limits=None,
                  partial_targets=False) -> 'TransferPlan':
        """Read what ``to_dict`` wrote, here or in DeepSpeed 0.19.8.

        Args:
            entry: the dict, which is not trusted.
            target_map, source_map: the maps that the plan claims to connect. With both, the plan is proved
                again: it writes every target address once, from a holder of that element.
            limits: a PlanBudget; its ``max_ndim`` and ``max_segments`` bound what is read.
            partial_targets: as for ``plan_transfer``; only used with maps.

        Raises:
            AffineTransferError: not such a dict, with the place that is wrong.
            InvalidMapError: the plan does not do what the maps ask for.
            ValueError: only one map was given.

        Example::

            plan = TransferPlan.from_dict(json.loads(text), target_map, source_map)
        """
        if (target_map is None) != (source_map is None):
            raise ValueError('give both the target map and the source map, or neither')
        plan = _read_plan(cls, entry, limits or PlanBudget())
        if target_map is None:
            return plan
        check_plan(plan, target_map, source_map, limits, partial_targets=partial_targets)
        source_numel = _shard_numels('source', source_map, plan.source_numel)
        target_numel = _shard_numels('target', target_map, plan.target_numel)
        return cls.from_columns(plan.columns, plan.logical_shape, source_numel, target_numel, plan.statistics)


def _shard_numels(side: str, affine_map, claimed: Mapping) -> Dict[int, int]:
    """Elements of each shard by the map, which what the plan claims must not contradict."""
    numels = {location: math.prod(shape) for location, shape in affine_map.shard_shapes.items()}
    for location, numel in claimed.items():
        if numels.get(location) != numel:
            raise InvalidMapError(
                f'plan {side}_numel says {numel} elements of location {location}; the {side} map says '
                f'{numels.get(location, "that there is no such location")}')
    return numels


def _read_plan(cls, entry, limits: PlanBudget) -> TransferPlan:
    parsing.expect_keys(entry, 'plan', ('logical_shape', 'segments'), ('source_numel', 'target_numel'))
    logical_shape = parsing.integers(entry['logical_shape'], 'plan logical_shape', 0)
    if len(logical_shape) > limits.max_ndim:
        raise AffineTransferError(f'plan logical_shape has {len(logical_shape)} axes, more than max_ndim '
                                  f'{limits.max_ndim}')
    if span(logical_shape) > MAX_ELEMENTS:
        raise AffineTransferError('plan logical_shape has more elements than int64 addresses may reach, which is '
                                  '2**62')
    parsing.expect_list(entry['segments'], 'plan segments')
    if len(entry['segments']) > limits.max_segments:
        raise AffineTransferError(f'plan has {len(entry["segments"])} segments, more than max_segments '
                                  f'{limits.max_segments}')
    segments = []
    moved = 0
    for index, item in enumerate(entry['segments']):
        segment = TransferSegment.from_dict(item, f'plan segment {index}')
        if len(segment.shape) > limits.max_ndim:
            raise AffineTransferError(f'plan segment {index} has {len(segment.shape)} axes, more than max_ndim '
                                      f'{limits.max_ndim}')
        segments.append(segment)
        moved += segment.numel
    if moved > MAX_ELEMENTS:
        raise AffineTransferError(f'plan moves {moved} elements; expected at most 2**62')
    columns = SegmentColumns.from_segments(segments, ndim=len(logical_shape))
    source_numel = _numels(entry.get('source_numel', []), 'plan source_numel')
    target_numel = _numels(entry.get('target_numel', []), 'plan target_numel')
    _check_bounds('source', source_numel, columns.source_rank, columns.source_last)
    _check_bounds('target', target_numel, columns.target_rank, columns.target_last)
    return cls.from_columns(columns, logical_shape, source_numel, target_numel)


def _numels(value, where: str) -> Dict[int, int]:
    parsing.expect_list(value, where)
    numels = {}
    for position, pair in enumerate(value):
        spot = f'{where}[{position}]'
        location, numel = _pair(pair, spot)
        if location in numels:
            raise AffineTransferError(f'{spot} names location {location} a second time')
        numels[location] = numel
    return numels


def _pair(value, where: str) -> Tuple[int, int]:
    parsing.expect_list(value, where)
    if len(value) != 2:
        raise AffineTransferError(f'{where} has {len(value)} items; expected a location and its elements')
    return parsing.location(value[0], f'{where} location'), parsing.integer(value[1], f'{where} elements', 0)


def _check_bounds(side: str, numels: Dict[int, int], ranks: np.ndarray, last: np.ndarray) -> None:
    """Every segment must end inside its shard, where the shards' sizes are known."""
    if not numels or not len(ranks):
        return
    locations = np.array(sorted(numels), dtype=np.int64)
    sizes = np.array([numels[location] for location in locations.tolist()], dtype=np.int64)
    position = np.minimum(np.searchsorted(locations, ranks), len(locations) - 1)
    unknown = np.flatnonzero(locations[position] != ranks)
    if len(unknown):
        raise AffineTransferError(f'plan segment {unknown[0]} {side} location {ranks[unknown[0]]} is not in '
                                  f'{side}_numel')
    beyond = np.flatnonzero(last >= sizes[position])
    if len(beyond):
        index = beyond[0]
        raise AffineTransferError(f'plan segment {index} {side} ends at element {last[index]} of location '
                                  f'{ranks[index]}, which has {sizes[position[index]]}')
