# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Who holds what before and after: the source and target map of every parameter that the rollouts need."""

from dataclasses import dataclass

from deepspeed.checkpoint.affine.algebra import concat_affine_maps, relabel
from deepspeed.checkpoint.affine.constructors import contiguous_split_map, replicated_map, sub_param_map
from deepspeed.checkpoint.affine.labels import location_ids
from deepspeed.checkpoint.affine.param_map import ParamAffineMap
from deepspeed.checkpoint.affine.union import union_affine_maps
from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints

from ds_affine.demo.model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, is_frozen

TRAINERS = 2
ROLLOUTS = 2
PROCESSES = TRAINERS + ROLLOUTS  # ranks of the joint group: the trainers, then the rollouts
# Rank within the joint group of each world's first process.
FIRST_RANK = {"trainer": 0, "rollout": TRAINERS}


@dataclass(frozen=True)
class Move:
    """One parameter as the rollouts hold it.

    name: its name there. parts: the trainers' parameters that it is made of, end to end.
    """
    name: str
    parts: tuple
    source: ParamAffineMap
    target: ParamAffineMap


def source_locations(names):
    """Location ids of every buffer that a transfer can read, from labels that every process lists alike.

    ("trainer", name, rank) is a ZeRO-3 partition; ("rollout", name, rank) is a shard of a frozen parameter that a
    rollout still holds from its former placement.
    """
    labels = [("trainer", name, rank) for name in names for rank in range(TRAINERS)]
    labels += [("rollout", name, rank) for name in names if is_frozen(name) for rank in range(ROLLOUTS)]
    return location_ids(labels)


def trainer_locations(locations, name):
    return [locations["trainer", name, rank] for rank in range(TRAINERS)]


def endpoints(locations):
    """Targets are numbered by rollout; sources live where their label says."""
    source = {location: FIRST_RANK[kind] + rank for (kind, _, rank), location in locations.items()}
    return TransferEndpoints(source=source, target={rank: TRAINERS + rank for rank in range(ROLLOUTS)})


def moves(partitions, locations):
    """Every move of the model, in an order that is the same on all processes.

    partitions: the map of each parameter over the trainers, by name.
    """
    names = [name for name in partitions if not name.endswith(("k_proj.weight", "v_proj.weight"))]
    return [_move(_parts(name), partitions, locations) for name in names]


def former_map(name, shape):
    """Where the rollouts held a frozen parameter before: cut along the axis that the new placement leaves whole."""
    return _split(shape, 0 if cut_axis(name) == 1 else 1)


def cut_axis(name):
    """The axis along which a rank's shard is cut: columns where a layer reads split activations, rows elsewhere."""
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def even_widths(size):
    """size over the rollouts, the first ones larger where it does not divide: 101 is 51 and 50."""
    return [size // ROLLOUTS + (rank < size % ROLLOUTS) for rank in range(ROLLOUTS)]


def _parts(name):
    """A query projection stands for the fused QKV; any other parameter is moved by itself."""
    if not name.endswith("q_proj.weight"):
        return (name, )
    return tuple(name.replace("q_proj", f"{part}_proj") for part in "qkv")


def _move(parts, partitions, locations):
    sources = [_source(part, partitions[part], locations) for part in parts]
    if len(parts) == 1:
        return Move(parts[0], parts, sources[0], _target(parts[0], sources[0].logical_shape))
    return Move(parts[0].replace("q_proj", "qkv_proj"), parts, concat_affine_maps(sources, 0), _fused_target())


def _source(name, partition, locations):
    if not is_frozen(name):
        return partition
    survivors = relabel(former_map(name, partition.logical_shape),
                        {rank: locations["rollout", name, rank]
                         for rank in range(ROLLOUTS)})
    return union_affine_maps([partition, survivors])


def _target(name, shape):
    if len(shape) == 1:
        return replicated_map(shape, ROLLOUTS)
    return _split(shape, cut_axis(name))


def _fused_target():
    """Each rank's query, key and value heads in one shard."""
    sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    return sub_param_map(shape=(sum(sizes), HIDDEN),
                         sub_dim_sizes=sizes,
                         shard_widths=[even_widths(size) for size in sizes],
                         partition_dim=0)


def _split(shape, axis):
    return contiguous_split_map(shape, even_widths(shape[axis]), axis)
