# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Other planners, for comparison: DeepSpeed's own, and the one that reshards torch's distributed checkpoints."""

import importlib.metadata
import importlib.util
import math
import sys
import types
from collections import Counter
from dataclasses import dataclass
from typing import List

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tables import cpu_seconds


@dataclass(frozen=True)
class Upstream:
    """DeepSpeed's own modules under private names, so that they stand beside ours in one process."""
    version: str
    affine: types.ModuleType
    transfer: types.ModuleType

    def plan(self, target, source):
        """The plan of two of its maps, with budgets that do not refuse it."""
        budget = self.transfer.PlanBudget(max_pieces_per_map=2**62,
                                          max_pair_checks=2**62,
                                          max_segments=2**62,
                                          max_plan_bytes=2**62,
                                          max_merge_checks=2**62)
        return self.transfer.plan_transfer(target, source, budget)

    def map_of(self, ours):
        """Its map for one of ours, piece by piece."""
        pieces = {
            location: [
                self.affine.AffinePiece(piece.shape, piece.source_offset, piece.source_strides, piece.dest_offset,
                                        piece.dest_strides, piece.locations, piece.scale) for piece in held
            ]
            for location, held in ours.pieces_by_rank.items()
        }
        return self.affine.ParamAffineMap(ours.logical_shape, dict(ours.shard_shapes), pieces)


def find_upstream(folder):
    """Load DeepSpeed's planner.

    Args:
        folder: a site-packages folder that holds DeepSpeed, or None for the one that this Python sees.

    Returns ``(upstream, None)``, or ``(None, why)`` where there is none.
    """
    found = importlib.metadata.distributions(name='deepspeed', **({'path': [folder]} if folder else {}))
    distribution = next(iter(found), None)
    if distribution is None:
        return None, f'DeepSpeed is not installed{f" in {folder}" if folder else ""}'
    paths = {
        name: distribution.locate_file(f'deepspeed/checkpoint/{name}.py')
        for name in ('affine', 'affine_transfer')
    }
    if not all(path.is_file() for path in paths.values()):
        return None, f'DeepSpeed {distribution.version} has no planner'
    parent = types.ModuleType('upstream_deepspeed')
    parent.__path__ = []
    sys.modules[parent.__name__] = parent
    modules = [_load(f'{parent.__name__}.{name}', path) for name, path in paths.items()]
    return Upstream(distribution.version, *modules), None


def _load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class ReadCall:
    """One call of torch's planner: what a rank reads of a parameter, and how often a model makes the same call."""
    source: TensorStorageMetadata
    chunks: List[ChunkStorageMetadata]
    times: int

    def measure(self):
        """CPU seconds and the read items, which must read every element once."""
        seconds, items = cpu_seconds(lambda: create_read_items_for_chunk_list('parameter', self.source, self.chunks))
        found = sum(math.prod(item.lengths) for item in items)
        expected = sum(math.prod(chunk.sizes) for chunk in self.chunks)
        if found != expected:
            raise SystemExit(f'torch reads {found} elements where {expected} are wanted, so times do not compare')
        return seconds, items


def read_calls(transfers, location=None):
    """The distinct calls of torch's planner for a model, as lists of ``ReadCall``, one list per pair of maps.

    Args:
        transfers: parameter name to ``ParameterTransfer``; equal layouts share their maps.
        location: only what this target location reads. Default: every location.
    """
    calls = (_calls(entry, members, location) for entry, members in distinct(transfers))
    return [group for group in calls if group]


def distinct(transfers):
    """One transfer for each pair of map objects, and how many parameters have that pair."""
    members = Counter((id(entry.target_map), id(entry.source_map)) for entry in transfers.values())
    first = {(id(entry.target_map), id(entry.source_map)): entry for entry in reversed(transfers.values())}
    return [(first[key], count) for key, count in members.items()]


def _metadata(source_map):
    chunks = [
        chunk for held in source_map.pieces_by_rank.values() for chunk in _chunks(held, source_map.logical_shape)
    ]
    return TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size(source_map.logical_shape), chunks)


def _calls(entry, members, location):
    times, chunks = Counter(), {}
    for at, held in entry.target_map.pieces_by_rank.items():
        if location is None or at == location:
            boxes = _chunks(held, entry.target_map.logical_shape)
            key = tuple((box.offsets, box.sizes) for box in boxes)
            times[key] += members
            chunks[key] = boxes
    if not times:
        return []
    source = _metadata(entry.source_map)
    return [ReadCall(source, chunks[key], count) for key, count in times.items()]


def _chunks(pieces, logical_shape):
    """The boxes that pieces are in the parameter; where they lie in a shard is no matter for torch."""
    return [ChunkStorageMetadata(torch.Size(_origin(piece.source_offset, logical_shape)), torch.Size(piece.shape))
            for piece in pieces if piece.numel]  # yapf: disable


def _origin(offset, shape):
    coordinates = []
    for size in reversed(shape):
        offset, coordinate = divmod(offset, size)
        coordinates.append(coordinate)
    return coordinates[::-1]
