# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of hpZ: the second copy of a ZeRO-3 model that every small group of ranks keeps for itself."""

import torch.distributed as dist

from deepspeed.checkpoint.affine.partitions import flat_partition_map
from deepspeed.checkpoint.affine_adapters.held import HeldParameter, module_of
from deepspeed.checkpoint.affine_adapters.partition_groups import partition_groups
from deepspeed.checkpoint.affine_adapters.zero3 import describe_partitioned, without_padding


def zero3_secondary_maps(engine_or_module):
    """Describe the secondary partitions of a model under ZeRO-3 with ``zero_hpz_partition_size``, where they exist.

    DeepSpeed makes the secondary partition of a parameter when it releases the gathered parameter. At an optimizer
    step it drops those of trained parameters and keeps those of frozen ones. So take these maps when they are to be
    used, and do not keep them over a step.

    The partition of W ranks pads a parameter to a multiple of W, and it is that padded length which every group of
    ``zero_hpz_partition_size`` ranks cuts again. Every such group holds a whole copy.

    Args:
        engine_or_module: as for ``zero3_maps``.

    Returns:
        ``{name: HeldParameter}``, for parameters that have a secondary partition now. The location of a rank's part is
        ``size of the job + global rank``, so that ``union_affine_maps`` can unite it with the map of ``zero3_maps``:
        the two are different buffers of one process.

    Raises:
        ValueError: a parameter that is not partitioned, is quantised, or whose secondary partition has another size
            or other groups than described above.

    Example::

        primary, secondary = zero3_maps(engine), zero3_secondary_maps(engine)
        layout = union_affine_maps([primary[name].layout, secondary[name].layout])
        buffers = {**primary[name].buffers, **secondary[name].buffers}
    """
    first_location, layouts = dist.get_world_size(), {}

    def describe(name, param):
        if param.ds_secondary_tensor is None:
            return None
        what = f'The secondary partition of parameter {name!r}'
        ranks = dist.get_process_group_ranks(param.ds_process_group)
        size = dist.get_world_size(param.ds_zero_param_process_group)
        # DeepSpeed cuts the ranks of the job into runs of this size.
        runs = [ranks[start:start + size] for start in range(0, len(ranks), size)]
        groups = partition_groups(param.ds_zero_param_process_group, runs, what)
        per_rank = -(-param.ds_numel // len(ranks)) * len(ranks) // size
        key = tuple(param.ds_shape), groups.groups
        if key not in layouts:
            layouts[key] = _layout(key[0], param.ds_numel, per_rank, groups, first_location)
        location = first_location + groups.rank
        held, = layouts[key].shard_shapes[location]
        secondary = without_padding(param.ds_secondary_tensor, per_rank, held, what)
        return HeldParameter(layouts[key], {location: secondary}, secondary.dtype)

    return describe_partitioned(module_of(engine_or_module), describe)


def _layout(shape, numel, per_rank, groups, first_location):
    edges = [min(part * per_rank, numel) for part in range(len(groups.ranks) + 1)]
    locations = [[first_location + rank for rank in group] for group in groups.groups]
    return flat_partition_map(shape, list(zip(edges, edges[1:])), locations=locations)
