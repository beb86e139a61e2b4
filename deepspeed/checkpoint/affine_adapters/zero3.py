# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The map of a live ZeRO-3 parameter, and the part of it that this process holds."""

import torch

from deepspeed.checkpoint.affine.partitions import zero3_partition_map

# What DeepSpeed puts on a parameter when it partitions it.
_PARTITION_ATTRIBUTES = ('ds_shape', 'ds_numel', 'ds_tensor', 'ds_process_group')


def zero3_parameter(param, *, locations=None):
    """Describe a parameter that a ZeRO-3 engine has partitioned, and hand out this process' elements of it.

    Nothing is gathered or copied. The buffer is a view of the engine's own partition without the padding at its end,
    so it shows the weights as they are after every optimizer step.

    Arguments:
        param: a parameter partitioned by DeepSpeed's ZeRO stage 3. It may be gathered at the moment.
        locations: the location id of each of the W ranks that the parameter is cut over. Default: 0 to W - 1.

    Returns ``(layout, buffers)``: the ``ParamAffineMap`` of all W partitions, the same on every rank, and a dict
    ``{location: tensor}`` with this rank's partition, a 1-D tensor with exactly the elements that the map describes
    (none where the rank holds padding only).

    Raises ``ValueError`` where ``param`` is not partitioned by ZeRO-3, and where its partition is elsewhere (swapped
    to a disk) or has another size than such a partition has.

    Example, on a rank of a trainer whose engine is ``engine``::

        layout, buffers = zero3_parameter(engine.module.lm_head.weight)
    """
    missing = [name for name in _PARTITION_ATTRIBUTES if not hasattr(param, name)]
    if missing:
        raise ValueError(f'This parameter of shape {tuple(param.shape)} has no {missing[0]}: it is not partitioned by '
                         'ZeRO stage 3. Pass a parameter of the module that deepspeed.initialize returned.')
    group = param.ds_process_group
    world_size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    ids = tuple(range(world_size)) if locations is None else tuple(locations)
    layout = zero3_partition_map(tuple(param.ds_shape), world_size, locations=ids)
    held, = layout.shard_shapes[ids[rank]]
    return layout, {ids[rank]: _without_padding(param, world_size, held)}


def _without_padding(param, world_size, held):
    partition = param.ds_tensor
    expected = -(-param.ds_numel // world_size)
    if partition.dim() != 1 or partition.numel() != expected:
        raise ValueError(f'The partition of this parameter of shape {tuple(param.ds_shape)} has shape '
                         f'{tuple(partition.shape)}; ZeRO-3 over {world_size} ranks holds ({expected},) on each. '
                         'Where it was swapped out, bring it back into memory first.')
    # The padding is uninitialised memory: nobody may read it, so it is not handed out.
    return partition.detach().narrow(0, 0, held)
