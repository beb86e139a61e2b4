# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of a live AutoTP model, from what its layers say about how they cut their parameters.

DeepSpeed 0.19.8's ``deepspeed/module_inject/layers.py`` puts a dict on every parameter that a tensor-parallel layer
owns, with the parameter's map in stored form where the layer can describe it. That and the layers' process group are
read here; nothing is gathered, copied or communicated.
"""

import torch.distributed as dist

from deepspeed.checkpoint.affine.composition import compose
from deepspeed.checkpoint.affine.constructors import replicated_map
from deepspeed.checkpoint.affine.param_map import ParamAffineMap
from deepspeed.checkpoint.affine.piece import AffinePiece
from deepspeed.checkpoint.affine_adapters.held import describe_each, module_of
from deepspeed.checkpoint.affine_adapters.replicated import replicated_buffers
from deepspeed.checkpoint.affine_adapters.shard_groups import held_in_groups, shard_groups
from deepspeed.checkpoint.affine_geometry.strides import product, row_major_strides

_LAYER_METADATA = 'ds_autotp_universal_checkpoint_meta'
_EXPERT_METADATA = 'ds_autoep_uc_meta'
_CUT_BY_A_LAYER = 'tensor_model_parallel'


def autotp_maps(engine_or_module, *, tensor_parallel_groups=None):
    """Describe every parameter and buffer of a model that AutoTP has cut, and hand out this process' part.

    Layers say themselves how their parameters are cut. What no layer has taken (norms, most embeddings) and the
    module's buffers are whole on every rank. Under ZeRO-3 the layout says how each rank's shard is cut again over the
    data-parallel ranks, and the buffers are the engine's own partitions without padding. Buffers are views: they may
    be taken once and read after every optimizer step.

    A location is the global rank that holds the part. Expert weights under AutoEP are left out; ``autoep_maps``
    describes them.

    Args:
        engine_or_module: what ``deepspeed.initialize`` returned, or the module within it.
        tensor_parallel_groups: global ranks of all tensor-parallel groups of the model, one sequence for each in the
            order of their shards. Default: under ZeRO-3 the groups that DeepSpeed makes, one for each data-parallel
            rank; otherwise this process' group alone, because a process does not know of the other copies.

    Returns:
        ``{name: HeldParameter}`` in the module's order, all names of a tied parameter among them. A logical shape is
        the shape of the parameter before it was cut.

    Raises:
        ValueError: the module has no AutoTP layer; a layer has cut a parameter in a way that no map describes, or in
            another way than it states; groups that are not those of the model.

    Example, on a rank of a TP-2 trainer::

        held = autotp_maps(engine)
        held['lm_head.weight'].layout.shard_shapes      # an uneven vocabulary: {0: (51, 32), 1: (50, 32)}
    """
    module = module_of(engine_or_module)
    named = [(name, param) for name, param in module.named_parameters(remove_duplicate=False)
             if not hasattr(param, _EXPERT_METADATA)]
    group = _tensor_parallel_group(module)
    for name, param in named:
        _refuse_undescribed(name, param)
    layouts = {}

    def describe(name, param):
        what = f'Parameter {name!r}'
        groups = shard_groups(group, tensor_parallel_groups, getattr(param, 'ds_process_group', None), what)
        return held_in_groups(param, _shards(param, len(groups.ranks)), groups, layouts, what)

    held = describe_each(named, id, describe)
    # Every parameter has a shard, perhaps an empty one, on all ranks of the model.
    ranks = sorted(next(iter(held.values())).layout.shard_shapes)
    return {**held, **replicated_buffers(module, ranks=ranks)}


def _tensor_parallel_group(module):
    """The process group of the AutoTP layers, which must have one and the same."""
    layers = {name: layer for name, layer in module.named_modules() if hasattr(layer, 'tp_world_size')}
    if not layers:
        raise ValueError('The module has no AutoTP layer, so nothing says how it is cut. Pass the engine that '
                         'deepspeed.initialize made with an autotp_size, or its module; where nothing is cut, use '
                         'replicated_maps or zero3_maps.')
    first, layer = next(iter(layers.items()))
    for name, other in layers.items():
        if other.mp_group is None:
            raise ValueError(f'The AutoTP layer {name!r} has no process group, so its ranks are not known.')
        if _ranks(other) != _ranks(layer):
            raise ValueError(f'The AutoTP layers {first!r} and {name!r} are cut over different ranks, {_ranks(layer)} '
                             f'and {_ranks(other)}; describe models one by one.')
    return layer.mp_group


def _ranks(layer):
    return dist.get_process_group_ranks(layer.mp_group)


def _refuse_undescribed(name, param):
    conversion = getattr(param, _LAYER_METADATA, {}).get('conversion', {})
    if 'affine_map' in conversion:
        return
    if conversion or getattr(param, _CUT_BY_A_LAYER, False):
        reason = conversion.get('unsupported_reason') or 'it carries no affine map'
        raise ValueError(f'The layer of parameter {name!r} does not describe how it cut it: {reason}. Gather this '
                         'parameter through DeepSpeed, or have the layer state a map.')


def _shards(param, world_size):
    """The map of a parameter over the places of its tensor-parallel group."""
    metadata = getattr(param, _LAYER_METADATA, None)
    if metadata is None:
        return replicated_map(tuple(getattr(param, 'ds_shape', param.shape)), world_size)
    conversion = metadata['conversion']
    stated = ParamAffineMap.from_dict(conversion['affine_map'])
    return _in_shape(stated, tuple(conversion['original_shape'] or stated.logical_shape))


def _in_shape(stated, shape):
    """A map of a parameter that its layer saw as ``stated.logical_shape``, as one of a parameter of ``shape``.

    A layer sees the rows of its weight as several axes: ``(experts, rows, columns)`` for ``(experts * rows,
    columns)``. A block of both is one entry of the axes before the last that was split.
    """
    seen = stated.logical_shape
    if seen == shape:
        return stated
    split = len(seen) - len(shape)
    if split < 1 or product(seen) != product(shape) or seen[split + 1:] != shape[1:]:
        raise ValueError(
            f'A layer states a layout of shape {seen} for a parameter of shape {shape}; the two must agree '
            'in all axes but the first ones.')
    block = (seen[split], ) + shape[1:]
    strides, numel = row_major_strides(block), product(block)
    pieces = [
        AffinePiece(block, start, strides, start, strides, (0, )) for start in range(0, product(shape), numel or 1)
    ]
    return compose(ParamAffineMap(shape, {0: seen}, {0: pieces}), {0: stated})
