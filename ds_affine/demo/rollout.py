# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A rollout: receives its tensor-parallel shards and compares them with the reference."""

import dataclasses
import pathlib

import torch

from deepspeed.checkpoint.affine.partitions import zero3_partition_map

from ds_affine.demo.layouts import TRAINERS, moves, source_locations, trainer_locations
from ds_affine.demo.model import build_model, is_frozen, parameter_shapes
from ds_affine.demo.reference import cut, former_shard, same_bits
from ds_affine.demo.trainer import REFERENCE_FILE, REFERENCE_READY
from ds_affine.demo.transfer import joint_group, move_all


def work(assignment, store):
    rank = assignment.rank
    shapes = parameter_shapes()
    locations = source_locations(shapes)
    partitions = {
        name: zero3_partition_map(shape, TRAINERS, locations=trainer_locations(locations, name))
        for name, shape in shapes.items()
    }
    wanted = moves(partitions, locations)
    shards = {move.name: {rank: torch.full(move.target.shard_shapes[rank], torch.nan)} for move in wanted}
    group = joint_group(assignment, store)
    lines = move_all(wanted, _survivors(rank, locations), shards, locations, group)
    store.wait([REFERENCE_READY])
    full = torch.load(pathlib.Path(assignment.folder) / REFERENCE_FILE)
    exact = {move.name: same_bits(shards[move.name][rank], cut(full, move.parts, rank)) for move in wanted}
    return [dataclasses.replace(line, exact=exact[line.name]) for line in lines]


def _survivors(rank, locations):
    """Shards of frozen parameters that were loaded under the former placement: {location: tensor} by name."""
    return {
        name: {
            locations["rollout", name, rank]: former_shard(name, parameter.detach(), rank)
        }
        for name, parameter in build_model().named_parameters() if is_frozen(name)
    }
