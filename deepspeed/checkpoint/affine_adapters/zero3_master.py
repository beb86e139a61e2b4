# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of the master weights of a ZeRO-3 engine: what its optimizer steps on, usually in fp32."""

from deepspeed.checkpoint.affine_adapters.held import HeldParameter, module_of
from deepspeed.checkpoint.affine_adapters.zero3 import describe_partitioned, layouts_by_shape


def zero3_master_maps(engine, *, replica_groups=None):
    """Describe the master weights of a ZeRO-3 engine, and hand out this process' elements of them.

    Nothing is gathered, copied or communicated. The optimizer keeps one flat buffer for every sub-group of
    parameters, with a partition of each behind that of the other; these buffers are views of it without the padding.
    They may be taken once and read after every optimizer step.

    Args:
        engine: what ``deepspeed.initialize`` returned, with an optimizer.
        replica_groups: as for ``zero3_maps``.

    Returns:
        ``{name: HeldParameter}`` in the module's order, for what the optimizer trains: no frozen parameters, no empty
        ones and no buffers, which ``zero3_maps`` has. The map of a parameter is that of ``zero3_maps``.

    Raises:
        ValueError: the engine's optimizer has no such partitions, or has swapped them to a disk; a parameter's group
            is not among ``replica_groups``.

    Example::

        held = {**zero3_maps(engine), **zero3_master_maps(engine)}  # fp32 where there is fp32
    """
    masters = _master_partitions(getattr(engine, 'optimizer', None))
    layout_of = layouts_by_shape(replica_groups)

    def describe(name, param):
        if param.ds_id not in masters:
            return None
        groups, layout = layout_of(param, f'Parameter {name!r}')
        held, = layout.shard_shapes[groups.rank]
        master = masters[param.ds_id]
        return HeldParameter(layout, {groups.rank: master.narrow(0, 0, held)}, master.dtype)

    return describe_partitioned(module_of(engine), describe)


def _master_partitions(optimizer):
    """``{ds_id: 1-D tensor}``, this process' master partition of every trained parameter, padding included."""
    if not hasattr(optimizer, 'fp32_partitioned_groups_flat'):
        raise ValueError(f'The optimizer is a {type(optimizer).__name__} without fp32_partitioned_groups_flat, so it '
                         'has no master weights of ZeRO stage 3. Pass an engine that trains with ZeRO stage 3.')
    masters = {}
    for number, (params, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat)):
        sizes = [param.ds_tensor.ds_numel for param in params]
        if flat.numel() != sum(sizes):
            raise ValueError(f'The master weights of sub-group {number} have {flat.numel()} elements; the partitions '
                             f'of its {len(params)} parameters have {sum(sizes)}. Where they were swapped out, bring '
                             'them back into memory first.')
        parts = flat.detach().split(sizes)
        masters.update((param.ds_id, part) for param, part in zip(params, parts))
    return masters
