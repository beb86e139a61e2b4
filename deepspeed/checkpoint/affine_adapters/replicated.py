# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of what every rank of a live model holds whole."""

import torch.distributed as dist

from deepspeed.checkpoint.affine.algebra import relabel
from deepspeed.checkpoint.affine.checks import integers
from deepspeed.checkpoint.affine.constructors import replicated_map
from deepspeed.checkpoint.affine_adapters.held import HeldParameter, describe_each, module_of


def replicated_maps(engine_or_module, *, ranks=None):
    """Describe parameters and buffers that every rank holds whole: data-parallel training, ZeRO-1 and ZeRO-2.

    Under ZeRO-1 and ZeRO-2 these are the weights in the precision that the model computes in, frozen ones included;
    ``zero12_master_maps`` has the fp32 weights. Nothing is copied or communicated, and nobody checks that the copies
    are equal. A location is a global rank. A parameter of a tensor-parallel layer is this rank's shard of it, held by
    the ranks of its data-parallel group.

    Args:
        engine_or_module: what ``deepspeed.initialize`` returned, or a module.
        ranks: the global ranks that hold a copy, this process among them. Default: all of the default process group.

    Returns:
        ``{name: HeldParameter}`` in the module's order, all names of a tied parameter among them.

    Raises:
        ValueError: a parameter that ZeRO-3 has partitioned; this process is not among ``ranks``.

    Example::

        held = {**replicated_maps(engine), **zero12_master_maps(engine)}  # fp32 where there is fp32
    """
    module = module_of(engine_or_module)
    partitioned = [name for name, param in module.named_parameters() if hasattr(param, 'ds_id')]
    if partitioned:
        raise ValueError(
            f'Parameter {partitioned[0]!r} is partitioned by ZeRO stage 3, so no rank holds it whole. Use '
            'zero3_maps.')
    named = module.named_parameters(remove_duplicate=False)
    return {**_describe(named, _checked_ranks(ranks)), **replicated_buffers(module, ranks=ranks)}


def replicated_buffers(module, *, ranks=None):
    """Like ``replicated_maps``, for the buffers of a module alone, persistent or not."""
    return _describe(module.named_buffers(remove_duplicate=False), _checked_ranks(ranks))


def _checked_ranks(ranks):
    everybody = range(dist.get_world_size())
    ranks = list(everybody if ranks is None else integers(ranks, 'ranks'))
    beyond = [rank for rank in ranks if rank not in everybody]
    if beyond:
        raise ValueError(f'ranks name rank {beyond[0]}, but the job has ranks 0 to {len(everybody) - 1}.')
    if dist.get_rank() not in ranks:
        raise ValueError(f'This process has rank {dist.get_rank()}, which is not among the ranks {ranks} that hold a '
                         'copy. Pass the group of this process.')
    return ranks


def _describe(named, ranks):
    own, layouts = dist.get_rank(), {}

    def describe(name, tensor):
        shape = tuple(tensor.shape)
        if shape not in layouts:
            layouts[shape] = relabel(replicated_map(shape, len(ranks)), dict(enumerate(ranks)))
        return HeldParameter(layouts[shape], {own: tensor.detach()}, tensor.dtype)

    return describe_each(named, id, describe)
