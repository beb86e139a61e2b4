# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the model states of a DeepSpeed checkpoint have besides trained parameters."""

from dataclasses import replace

import torch

from deepspeed.checkpoint.affine_adapters.stored import whole
from deepspeed.checkpoint.affine_adapters.zero_files import zero3_frozen


def frozen_of(files, rank, models):
    """Frozen parameters of a module that ZeRO-3 has cut; ``models``: model states of all data-parallel ranks."""
    paths = [files.model_path(rank, data_rank) for data_rank in range(len(models))]
    return zero3_frozen(models[0].get('frozen_param_shapes') or {}, models, paths)


def buffers_of(model):
    """``{name: tensor}`` of the buffers, which model states have whole in any case."""
    module = model.get('module') or {}
    return {name: module[name] for name in model.get('buffer_names') or [] if name in module}


def left_out(model, held):
    """``{name: why}`` of the module's tensors of which the files hold nothing."""
    why = 'the files hold nothing under this name, which may be a further one of a tied parameter'
    return {name: why for name in model.get('module') or {} if name not in held}


def with_whole(model, cut, rest):
    """Parameters that ZeRO cut, with tensors that this rank has whole, in the module's order, and tied names.

    Args:
        model: model states of a rank.
        cut: name -> HeldParameter. rest: name -> tensor.
    """
    tied, held, first_at = dict(model.get('shared_params') or {}), {}, {}
    for name in [*(model.get('module') or {}), *cut]:
        if name in cut:
            held[name] = cut[name]
        elif name in rest and name not in tied:
            tensor = rest[name].detach()
            # Without ZeRO nothing else says which are one.
            place = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
            if tensor.numel() and first_at.setdefault(place, name) != name:
                tied[name] = first_at[place]
            else:
                held[name] = whole(tensor)
    held.update({name: replace(held[first], tied_to=first) for name, first in tied.items() if first in held})
    return held


def trained_shapes(model):
    """``{name: shape}`` of the parameters that the rank of these model states trains, in the optimizer's order."""
    return {name: tuple(shape) for group in model.get('param_shapes') or [] for name, shape in group.items()}


def begins_as(master, tensor):
    """Whether the first element of a master weight, as the module's dtype has it, is that of the module's tensor."""
    master, own = first_of(master), first_of(tensor)
    return torch.equal(master.to(own.dtype).nan_to_num(), own.nan_to_num())


def first_of(tensor):
    """The first element, without reading the others."""
    return tensor.detach()[(0, ) * tensor.dim()].reshape(1)
