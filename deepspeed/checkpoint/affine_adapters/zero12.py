# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of the master weights of a ZeRO-1 or ZeRO-2 engine, which one flat buffer holds for many parameters."""

from dataclasses import dataclass
from itertools import chain
from typing import List

import torch

from deepspeed.checkpoint.affine.algebra import relabel
from deepspeed.checkpoint.affine.partitions import flat_partition_map
from deepspeed.checkpoint.affine_adapters.held import HeldParameter, describe_each, module_of
from deepspeed.checkpoint.affine_adapters.partition_groups import PartitionGroups, partition_groups


def zero12_master_maps(engine, *, replica_groups=None):
    """Describe the master weights of a ZeRO-1 or ZeRO-2 engine, and hand out this process' elements of them.

    The optimizer flattens all parameters of a parameter group into one buffer, in an order and with an alignment of
    its own, and cuts that buffer into equal partitions, anywhere within parameters. Each rank keeps its partition as
    master weights, usually in fp32. Where a parameter lies in the buffer is read from the parameter itself: while
    training, ZeRO-1 and ZeRO-2 let it be a view of the buffer. Nothing is gathered, copied or communicated, and the
    buffers handed out are views that may be read after every optimizer step.

    A location is the global rank that holds the part. A map has those ranks only that hold some of the parameter.
    Padding is no part of it.

    Args:
        engine: what ``deepspeed.initialize`` returned, with ZeRO stage 1 or 2 and an optimizer.
        replica_groups: as for ``zero3_maps``.

    Returns:
        ``{name: HeldParameter}`` in the module's order, for what the optimizer trains: no frozen parameters, no empty
        ones and no buffers, which ``replicated_maps`` has. ``buffers`` is empty on a rank that holds nothing of it.

    Raises:
        ValueError: the engine's optimizer is none of ZeRO-1 or ZeRO-2; a parameter is no view of the flat buffer, such
            as after ``offload_states``; its group is not among ``replica_groups``.

    Example, on a rank of a trainer with ZeRO-2::

        held = {**replicated_maps(engine), **zero12_master_maps(engine)}  # fp32 where there is fp32
    """
    group_of = {
        id(param): group
        for group in _flat_groups(getattr(engine, 'optimizer', None), replica_groups)
        for param in group.params
    }
    layouts = {}

    def describe(name, param):
        return _described(name, param, group_of[id(param)], layouts) if id(param) in group_of else None

    return describe_each(module_of(engine).named_parameters(remove_duplicate=False), id, describe)


@dataclass(frozen=True, eq=False)
class _FlatGroup:
    """params, a list, flattened into ``whole`` (1-D), of which ``partition`` (1-D) is this process' master part."""
    params: List
    whole: torch.Tensor
    partition: torch.Tensor
    groups: PartitionGroups


# What DeepSpeed's two optimizers call their parameters, the whole flat buffer and this process' master part, by group.
_NAMES = (
    ('bit16_groups', 'bit16_groups_flat', 'single_partition_of_fp32_groups'),
    ('bf16_groups', 'bf16_groups_flat', 'fp32_groups_flat_partition'),
)


def _flat_groups(optimizer, replica_groups):
    for names in _NAMES:
        if all(hasattr(optimizer, name) for name in names):
            columns = (getattr(optimizer, name) for name in (*names, 'real_dp_process_group'))
            return [
                _flat_group(number, params, whole, partition,
                            partition_groups(group, replica_groups, f'Parameter group {number}'))
                for number, (params, whole, partition, group) in enumerate(zip(*columns))
            ]
    raise ValueError(f'The optimizer is a {type(optimizer).__name__} without {_NAMES[0][-1]}, so it has no master '
                     'weights of ZeRO stage 1 or 2. Pass an engine that trains with one of them.')


def _flat_group(number, params, whole, partition, groups):
    if partition.numel() * len(groups.ranks) != whole.numel():
        raise ValueError(f'Parameter group {number} has a flat buffer of {whole.numel()} elements over '
                         f'{len(groups.ranks)} ranks, but the master partition of this one has {partition.numel()}. '
                         'Where states were offloaded, bring them back with reload_states first.')
    return _FlatGroup(params, whole, partition.detach(), groups)


def _described(name, param, flat, layouts):
    size, groups = flat.partition.numel(), flat.groups
    start = _offset(name, param, flat.whole)
    stop = start + param.numel()
    holders = range(start // size, (stop - 1) // size + 1)
    bounds = tuple((max(part * size, start) - start, min((part + 1) * size, stop) - start) for part in holders)
    layout = _layout(tuple(param.shape), bounds, [[ranks[part] for part in holders] for ranks in groups.groups],
                     layouts)
    buffers = {}
    if groups.position in holders:
        first, last = bounds[groups.position - holders.start]
        buffers[groups.rank] = flat.partition.narrow(0, start + first - groups.position * size, last - first)
    return HeldParameter(layout, buffers, flat.partition.dtype)


def _layout(shape, bounds, locations, layouts):
    """The map of runs with these locations for each copy. Most parameters lie in one partition and differ in its
    rank alone, so maps are made once, under locations 0 and up, and kept in the dict ``layouts``."""
    key = shape, bounds, len(locations)
    if key not in layouts:
        places = iter(range(len(locations) * len(bounds)))
        layouts[key] = flat_partition_map(shape, bounds, locations=[[next(places) for _ in bounds] for _ in locations])
    return relabel(layouts[key], dict(enumerate(chain.from_iterable(locations))))


def _offset(name, param, whole):
    """Where in the flat buffer a parameter begins, in elements."""
    offset, rest = divmod(param.data_ptr() - whole.data_ptr(), whole.element_size())
    inside = 0 <= offset <= whole.numel() - param.numel()
    if rest or not inside or param.dtype != whole.dtype or not param.is_contiguous():
        raise ValueError(f'Parameter {name!r} of shape {tuple(param.shape)} and {param.dtype} is no dense view of the '
                         f'flat buffer of {whole.numel()} elements of {whole.dtype} that its optimizer made of it. '
                         'Where states were offloaded, bring them back with reload_states first.')
    return offset
