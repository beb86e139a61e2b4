# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of a live ZeRO-3 model in the precision that it computes in, and the part that this process holds.

Attributes that DeepSpeed's ``deepspeed/runtime/zero/partition_parameters.py`` puts on a parameter are read here and in
the modules beside this one; nothing is gathered, copied or communicated.
"""

import torch.distributed as dist

from deepspeed.checkpoint.affine.partitions import zero3_partition_map
from deepspeed.checkpoint.affine_adapters.held import HeldParameter, describe_each, module_of
from deepspeed.checkpoint.affine_adapters.partition_groups import partition_groups
from deepspeed.checkpoint.affine_adapters.replicated import replicated_buffers

_PARTITION_ATTRIBUTES = ('ds_shape', 'ds_numel', 'ds_tensor', 'ds_process_group')


def zero3_maps(engine_or_module, *, replica_groups=None):
    """Describe every parameter and buffer of a model that ZeRO-3 has partitioned, and hand out this process' elements.

    Nothing is gathered, copied or communicated. The buffers are views of the engine's own partitions without the
    padding at their ends. They may be taken once and read after every optimizer step; take them anew after
    ``offload_states`` and ``reload_states``, which move the partitions elsewhere.

    A location is the global rank that holds the part. Frozen parameters, those under the persistence threshold and
    gathered ones are partitioned like all others. Buffers of the module are held whole by every rank of the job; that
    they are equal everywhere is up to the model.

    Args:
        engine_or_module: what ``deepspeed.initialize`` returned, or the module within it.
        replica_groups: the groups of ranks that hold a copy of the model each, where there are several: global ranks,
            one sequence for each group. A process knows its own group only, so without this its maps describe that
            group's copy. A parameter of a tensor-parallel layer is this rank's shard, and other groups hold other
            shards: no replicas.

    Returns:
        ``{name: HeldParameter}`` in the module's order, all names of a tied parameter among them.

    Raises:
        ValueError: a parameter that is not partitioned, is quantised, or whose partition is elsewhere (swapped to a
            disk) or of another size than a ZeRO-3 partition; its group is not among ``replica_groups``.

    Example, on a rank of a trainer, and where every process of the transfer is a rank of it::

        held = zero3_maps(engine)
        endpoints = TransferEndpoints(source={rank: rank for rank in range(trainers)}, target=...)
    """
    module = module_of(engine_or_module)
    layout_of = layouts_by_shape(replica_groups)

    def describe(name, param):
        what = f'Parameter {name!r}'
        groups, layout = layout_of(param, what)
        own = _own_elements(param, layout, len(groups.ranks), groups.rank, what)
        return HeldParameter(layout, {groups.rank: own}, own.dtype)

    return {**describe_partitioned(module, describe), **replicated_buffers(module)}


def zero3_parameter(param, *, locations=None):
    """Describe a parameter that a ZeRO-3 engine has partitioned, and hand out this process' elements of it.

    Nothing is gathered or copied. The buffer is a view of the engine's own partition without the padding at its end,
    so it shows the weights as they are after every optimizer step.

    Args:
        param: a parameter partitioned by DeepSpeed's ZeRO stage 3. It may be gathered at the moment.
        locations: the location id of each of the W ranks that the parameter is cut over. Default: their global ranks.

    Returns:
        ``(layout, buffers)``: the ``ParamAffineMap`` of all W partitions, the same on every rank, and a dict
        ``{location: tensor}`` with this rank's partition, a 1-D tensor with exactly the elements that the map
        describes (none where the rank holds padding only).

    Raises:
        ValueError: ``param`` is not partitioned by ZeRO-3, is quantised, or its partition is elsewhere (swapped to a
            disk) or has another size than such a partition has.

    Example, on a rank of a trainer whose engine is ``engine``::

        layout, buffers = zero3_parameter(engine.module.lm_head.weight)
    """
    what = f'This parameter of shape {tuple(getattr(param, "ds_shape", param.shape))}'
    _check_partitioned(param, what)
    group = param.ds_process_group
    ids = tuple(dist.get_process_group_ranks(group) if locations is None else locations)
    world_size = dist.get_world_size(group)
    layout = zero3_partition_map(tuple(param.ds_shape), world_size, locations=ids)
    own = ids[dist.get_rank(group)]
    return layout, {own: _own_elements(param, layout, world_size, own, what)}


def describe_partitioned(module, describe):
    """``describe_each`` of the parameters of a module; ``ValueError`` for one that ZeRO-3 has not partitioned."""
    named = list(module.named_parameters(remove_duplicate=False))
    for name, param in named:
        _check_partitioned(param, f'Parameter {name!r}')
    # Tied names are one parameter with one ds_id; storage tells nothing while nothing is gathered.
    return describe_each(named, lambda param: param.ds_id, describe)


def layouts_by_shape(replica_groups):
    """Return a function from a parameter and what to call it to its ``PartitionGroups`` and its map.

    A model has tens of thousands of parameters of tens of shapes over one or two groups: each map is made once.
    """
    groups_of, layouts = {}, {}

    def layout_of(param, what):
        group, shape = param.ds_process_group, tuple(param.ds_shape)
        if group not in groups_of:
            groups_of[group] = partition_groups(group, replica_groups, what)
        groups = groups_of[group]
        if (group, shape) not in layouts:
            layouts[group, shape] = zero3_partition_map(shape, len(groups.ranks), locations=groups.groups)
        return groups, layouts[group, shape]

    return layout_of


def without_padding(partition, expected, held, what):
    """The ``held`` elements of a 1-D partition of ``expected`` elements, called ``what`` in an error.

    The padding behind them is uninitialised memory: nobody may read it, so it is not handed out.
    """
    if hasattr(partition, 'ds_quant_scale'):
        raise ValueError(f'{what} is quantised: its partition holds codes and not values, which no map describes. '
                         'Turn quantised weights off in the configuration.')
    state = getattr(getattr(partition, 'status', None), 'name', 'AVAILABLE')
    if state != 'AVAILABLE' or tuple(partition.shape) != (expected, ):
        raise ValueError(f'{what} has a partition of shape {tuple(partition.shape)} that is {state}; expected shape '
                         f'({expected},), its part of the padded parameter, and AVAILABLE. Where it was swapped out, '
                         'bring it back into memory first.')
    return partition.detach().narrow(0, 0, held)


def _own_elements(param, layout, world_size, location, what):
    held, = layout.shard_shapes[location]
    return without_padding(param.ds_tensor, -(-param.ds_numel // world_size), held, what)


def _check_partitioned(param, what):
    missing = [name for name in _PARTITION_ATTRIBUTES if not hasattr(param, name)]
    if missing:
        raise ValueError(f'{what} has no {missing[0]}: it is not partitioned by ZeRO stage 3. Pass what '
                         'deepspeed.initialize returned, or parameters of its module.')
