# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of live DTensors, those of FSDP2 and torch's tensor parallelism among them, and the part of this process."""

import numpy as np
import torch

from deepspeed.checkpoint.affine.checks import integer, listed, shown
from deepspeed.checkpoint.affine_adapters.placements import placement_map


def dtensor_map(dtensor, *, locations=None):
    """Describe a DTensor, and hand out this process' shard of it.

    Nothing is communicated, gathered or copied. The buffer is the DTensor's own local tensor. FSDP2 keeps it from
    step to step; after a module was moved to another device or dtype, ask again.

    Args:
        dtensor: a ``torch.distributed.tensor.DTensor``, such as a parameter that ``fully_shard``,
            ``parallelize_module`` or ``distribute_tensor`` made.
        locations: mapping from the rank of each process in the DTensor's mesh to its location id. Default: the rank
            itself, as torch's default group numbers it.

    Returns:
        ``(layout, buffers)``: the ``ParamAffineMap`` of all shards on the DTensor's mesh, the same on every rank of
        it, and a dict ``{location: tensor}`` with this rank's shard, empty where the rank is not in the mesh. On a
        sub-mesh, such as ``mesh['tp']``, the layout names the ranks of that sub-mesh alone; ``placement_map`` with
        ``Replicate()`` for the other mesh dimensions describes all of them.

    Raises:
        TypeError: anything but a DTensor, a placement of an unknown kind.
        ValueError: ``Partial`` placements, because no rank then holds an element; an axis that was cut in an order
            which the placements do not tell; shards over mesh ranks that are not ascending; a local tensor of another
            shape than the placements tell; ``locations`` that leave a rank out or name an id twice.

    Example, on a rank of a trainer whose model is wrapped by ``fully_shard``::

        layout, buffers = dtensor_map(model.lm_head.weight)
    """
    if not isinstance(dtensor, torch.Tensor) or not hasattr(dtensor, 'device_mesh'):
        raise TypeError(f'dtensor_map takes a DTensor, but this is {shown(dtensor)}. Where FSDP2 has gathered a '
                        'parameter, call reshard() on its module first. A plain tensor that every rank holds whole is '
                        'described by replicated_map.')
    mesh = dtensor.device_mesh
    ranks = np.asarray(mesh.mesh)
    layout = placement_map(tuple(dtensor.shape), ranks, dtensor.placements, locations=locations)
    _check_cutting_order(dtensor)
    _check_group_order(ranks, dtensor.placements)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return layout, {}
    rank = int(ranks[tuple(coordinate)])
    location = rank if locations is None else integer(locations[rank], f'locations[{rank}]')
    local = _local_tensor(dtensor)
    if tuple(local.shape) != layout.shard_shapes[location]:
        raise ValueError(f'Rank {rank} holds a local tensor of shape {tuple(local.shape)}, but a DTensor of shape '
                         f'{tuple(dtensor.shape)} with placements {tuple(dtensor.placements)} on a mesh of shape '
                         f'{ranks.shape} has {layout.shard_shapes[location]} there. It was put together from '
                         'pieces of other sizes (by DTensor.from_local, say); make it with distribute_tensor.')
    return layout, {location: local}


def _check_cutting_order(dtensor):
    """Raise where torch's own record says that an axis was cut in an order which the placements do not tell."""
    for entry in getattr(dtensor._spec, 'shard_order', None) or ():
        axis, mesh_dims = entry
        if list(mesh_dims) != sorted(mesh_dims):
            raise ValueError(
                f'Axis {axis} of this DTensor is cut over mesh dimensions {tuple(mesh_dims)} in that order, '
                'which its placements do not say. Redistribute it to the default order, left to right.')


def _check_group_order(ranks, placements):
    """Raise for meshes whose shards lie with other ranks than the mesh says.

    The process group of a mesh dimension numbers its ranks in ascending order whatever the mesh says, and collectives
    follow the group: on such a mesh ``distribute_tensor`` and ``full_tensor`` exchange shards (seen in torch 2.13).
    """
    for mesh_dim, placement in enumerate(placements):
        lines = np.moveaxis(ranks, mesh_dim, -1).reshape(-1, ranks.shape[mesh_dim])
        turned = (np.diff(lines, axis=1) < 0).any(axis=1)
        if turned.any() and not placement.is_replicate():
            raise ValueError(
                f'The DTensor is sharded over mesh dimension {mesh_dim}, whose ranks are not ascending, such '
                f'as {listed(lines[turned.argmax()].tolist())}. Collectives of torch number them in ascending '
                'order, so what a rank holds depends on how the DTensor was made. Make it on a mesh with '
                'ascending ranks.')


@torch.no_grad()
def _local_tensor(dtensor):
    local = dtensor.to_local().detach()
    # After an asynchronous redistribution the values may still be on their way.
    return local.wait() if hasattr(local, 'wait') else local
