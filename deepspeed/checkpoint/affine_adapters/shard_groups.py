# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of parameters whose shards lie with several groups of ranks: a copy in every group, or cut over the groups.

Tensor- and expert-parallel ranks form groups that hold a parameter once each. The ranks with the same place in their
groups are data-parallel to each other: they hold equal shards, or ZeRO-3 cuts the shard over them.
"""

import torch.distributed as dist

from deepspeed.checkpoint.affine.algebra import relabel
from deepspeed.checkpoint.affine.composition import compose
from deepspeed.checkpoint.affine.partitions import zero3_partition_map
from deepspeed.checkpoint.affine.union import union_affine_maps
from deepspeed.checkpoint.affine_adapters.held import HeldParameter
from deepspeed.checkpoint.affine_adapters.partition_groups import partition_groups
from deepspeed.checkpoint.affine_adapters.zero3 import zero3_parameter
from deepspeed.checkpoint.affine_geometry.strides import product


def shard_groups(group, given, data_parallel_group, what):
    """Return the ``PartitionGroups`` of ranks that hold one shard each.

    Args:
        group: the process group of this process' shards.
        given: global ranks of all such groups, one sequence for each; None: ``group`` alone, or where ZeRO-3 cuts the
            shards, one group for each member of ``data_parallel_group``, as far from ``group`` as that member is from
            this process. DeepSpeed lays out its groups like that.
        data_parallel_group: the process group that ZeRO-3 cuts this process' shard over, or None.
        what: how to call the parameter in an error.

    Raises:
        ValueError: ``group`` is not among the given ones, or ZeRO-3 cuts over other ranks than those that have this
            process' place in the groups.
    """
    if data_parallel_group is None:
        return partition_groups(group, given, what)
    members = dist.get_process_group_ranks(data_parallel_group)
    if given is None:
        own, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        given = [[member + rank - own for rank in ranks] for member in members]
    groups = partition_groups(group, given, what)
    expected = [ranks[groups.position] for ranks in groups.groups]
    if members != expected:
        raise ValueError(
            f'{what}: ZeRO-3 cuts this shard over the ranks {members}, but the groups '
            f'{[list(ranks) for ranks in groups.groups]} have the ranks {expected} at its place. Name one '
            'group for each of those ranks, in their order.')
    return groups


def held_in_groups(param, shards, groups, layouts, what):
    """Return the ``HeldParameter`` of a parameter whose shards lie with groups of ranks.

    Args:
        param: this rank's shard, perhaps partitioned by ZeRO-3.
        shards: ``ParamAffineMap`` of the shards; its locations are the places in a group.
        groups: ``PartitionGroups``.
        layouts: dict that keeps the layouts of a model, because many of its parameters have the same.
        what: how to call the parameter in an error.

    Raises:
        ValueError: ``param`` does not have the shape of its shard.
    """
    partitioned = hasattr(param, 'ds_id')
    shape = shards.shard_shapes[groups.position]
    _check_shape(tuple(param.ds_shape if partitioned else param.shape), shape, groups.rank, what)
    key = shards, groups.groups, partitioned
    if key not in layouts:
        layouts[key] = _cut_over(shards, groups.groups) if partitioned else _copied(shards, groups.groups)
    if partitioned:
        _, buffers = zero3_parameter(param, locations=[ranks[groups.position] for ranks in groups.groups])
        return HeldParameter(layouts[key], buffers, param.ds_tensor.dtype)
    return HeldParameter(layouts[key], {groups.rank: param.detach().view(shape)}, param.dtype)


def _check_shape(held, shape, rank, what):
    # A layer may count the axes of its weight in another way, so only equal numbers of axes must agree.
    if product(held) != product(shape) or (len(held) == len(shape) and held != shape):
        raise ValueError(
            f'{what} has shape {held} on rank {rank}, but the layout that it carries has a shard of shape '
            f'{shape} there: it was cut in another way than its layer states.')


def _copied(shards, groups):
    copies = [relabel(shards, dict(enumerate(ranks))) for ranks in groups]
    return copies[0] if len(copies) == 1 else union_affine_maps(copies)


def _cut_over(shards, groups):
    return compose(
        shards, {
            place: zero3_partition_map(shape, len(groups), locations=[ranks[place] for ranks in groups])
            for place, shape in shards.shard_shapes.items()
        })
