# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where the files of a DeepSpeed checkpoint keep the experts that AutoEP has placed.

A rank's ``param_shapes``, flat buffers and maps of places have its local experts alone. Model states say which those
are: ``ds_autoep_layers``, checked against checkpoints that DeepSpeed 0.19.8 saves. ZeRO cuts local experts over the
ranks that have the same ones, not over all data-parallel ranks.
"""

from dataclasses import dataclass
from math import prod
from typing import Dict, Tuple

import torch

from deepspeed.checkpoint.affine.checks import listed, shown
from deepspeed.checkpoint.affine.composition import compose
from deepspeed.checkpoint.affine.constructors import contiguous_split_map
from deepspeed.checkpoint.affine.param_map import ParamAffineMap
from deepspeed.checkpoint.affine.partitions import zero3_partition_map
from deepspeed.checkpoint.affine_adapters.autoep import autoep_placement_map
from deepspeed.checkpoint.affine_adapters.held import HeldParameter
from deepspeed.checkpoint.affine_adapters.module_states import begins_as, first_of, trained_shapes
from deepspeed.checkpoint.affine_adapters.stored import CheckpointError
from deepspeed.checkpoint.affine_adapters.zero_files import flat_pieces, laid_flat, zero3_flats, zero3_places

_LAYERS = 'ds_autoep_layers'


@dataclass(frozen=True, eq=False)
class ExpertWeight:
    """One weight of all experts of a layer.

    Attributes:
        layer: number of the layer, as in the names of files.
        shape: of all experts' weights, ``(experts, ...)``.
        placed: their map over the ranks of an expert-parallel group. experts: ids of those that each of these has.
        holders: for each of those, the data-parallel ranks that have its experts, in the order in which ZeRO cuts
            those over them.
    """
    layer: int
    shape: Tuple[int, ...]
    placed: ParamAffineMap
    experts: Tuple[Tuple[int, ...], ...]
    holders: Tuple[Tuple[int, ...], ...]

    @property
    def copies(self) -> int:
        """Data-parallel ranks that have the same experts."""
        return len(self.holders[0])


def expert_weights(model, world_size, path) -> Dict[str, ExpertWeight]:
    """The experts of which the model states of a data-parallel rank tell, by name.

    Args:
        model: model states. world_size: data-parallel ranks. path: the file of ``model``.

    Raises:
        CheckpointError: experts that AutoEP has not placed, or placements that contradict themselves.
    """
    weights = {}
    for layer in model.get(_LAYERS) or []:
        try:
            first = (model.get('ds_config') or {}).get('use_data_before_expert_parallelism', False)
            holders = _holders(world_size, layer['ep_size'], first)
            for name, described in layer['affine_maps']['params'].items():
                shape = tuple(described['logical_shape'])
                placed = autoep_placement_map(layer['expert_placement'], shape)
                ids = {entry['rank']: tuple(entry['experts']) for entry in layer['expert_placement']['ranks']}
                weights[name] = ExpertWeight(layer['moe_layer_id'], shape, placed,
                                             tuple(ids[rank] for rank in sorted(ids)), holders)
        except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
            raise CheckpointError(f'{path}: {_LAYERS} does not say where the experts are: {error!r}') from error
    return weights


def zero3_experts(weights, models, states, paths):
    """Master weights of experts under ZeRO-3.

    Args:
        weights: of ``expert_weights``. models: model states of all data-parallel ranks. states: their optimizer
            states. paths: the files of those.

    Returns:
        ``{name: HeldParameter}`` over locations 0 to ``len(states) - 1``.

    Raises:
        CheckpointError: files that disagree with the placements or with one another.
    """
    _check_stated(weights, models, paths)
    flats = zero3_flats(states, paths)
    copies = {name: weight.copies for name, weight in weights.items()}
    shapes = [trained_shapes(model) for model in models]
    places = [
        zero3_places(own, copies, [len(flat) for flat in flats[rank]], len(states), paths[rank])
        for rank, own in enumerate(shapes)
    ]
    # Layers mostly have equal placements.
    held, layouts = {}, {}
    for name, weight in weights.items():
        inner, buffers = {}, {}
        for place, holders in enumerate(weight.holders):
            layout = zero3_partition_map(weight.placed.shard_shapes[place], len(holders), locations=holders)
            for rank in holders:
                own, needed = shapes[rank].get(name), weight.placed.shard_shapes[place]
                if own != needed:
                    raise CheckpointError(
                        f'{paths[rank]}: trains experts {name!r} of shape {own}, but rank {place} of '
                        f'their placement has {needed}; frozen ones are not read from ZeRO-3.')
                count = prod(layout.shard_shapes[rank])
                number, start = places[rank].get(name, (0, 0))
                buffers[rank] = flats[rank][number][start:start + count]
            inner[place] = layout
        if weight.placed not in layouts:
            layouts[weight.placed] = compose(weight.placed, inner)
        held[name] = HeldParameter(layouts[weight.placed], buffers, buffers[weight.holders[0][0]].dtype)
    return held


def flat_experts(weights, states, paths):
    """Master weights of experts under ZeRO-1 and 2. Arguments, result and errors as for ``zero3_experts``; a location
    is there only where it holds something."""
    pieces, held = flat_pieces(states, paths), {}
    for name, weight in weights.items():
        if name not in pieces:
            # Frozen.
            continue
        inner, buffers, by_rank = {}, {}, dict(pieces[name])
        for place, holders in enumerate(weight.holders):
            parts = [(rank, by_rank[rank]) for rank in holders if rank in by_rank]
            one = laid_flat(name, weight.placed.shard_shapes[place], parts, paths)
            inner[place] = one.layout
            buffers.update(one.buffers)
        held[name] = HeldParameter(compose(weight.placed, inner), buffers, one.dtype)
    return held


def single_experts(weights, files):
    """Experts as the module holds them, each in a file of its own.

    Args:
        weights: of ``expert_weights``. files: ``RankFiles``.

    Returns:
        ``{name: HeldParameter}``; location e has expert e.

    Raises:
        CheckpointError: a file that is missing, or has other experts.
    """
    held, read = {}, {}
    for name, weight in weights.items():
        buffers = {}
        for expert in range(weight.shape[0]):
            key = weight.layer, expert
            if key not in read:
                read[key] = files.load_expert(*key)
            tensor = read[key].get(f'{name}.{expert}')
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != weight.shape[1:]:
                raise CheckpointError(f'{files.experts[key]}: has no {name}.{expert} of shape {weight.shape[1:]}.')
            buffers[expert] = tensor.detach()[None]
        layout = contiguous_split_map(weight.shape, [1] * weight.shape[0], 0)
        held[name] = HeldParameter(layout, buffers, buffers[0].dtype)
    return held


def check_experts(trained, single, weights, path):
    """Compare the first element of every rank's experts with the module's: files of ZeRO-1 and 2 do not say which
    ranks have which experts.

    Raises:
        CheckpointError: they differ.
    """
    for name, held in trained.items():
        weight = weights[name]
        for ids, holders in zip(weight.experts, weight.holders):
            rank = min((rank for rank in holders if rank in held.buffers), default=None)
            if rank is None or not ids or not prod(weight.shape):
                continue
            master, own = held.buffers[rank], single[name].buffers[ids[0]]
            if not begins_as(master, own):
                raise CheckpointError(
                    f'{path}: rank {rank} begins {name!r} with {first_of(master).item():g}, but expert '
                    f'{ids[0]} begins with {first_of(own).item():g}: it has other experts than its '
                    'placement says.')


def _holders(world_size, ranks, data_parallel_first):
    """DeepSpeed makes expert-parallel groups of ranks that follow one another, or else as far apart as possible."""
    copies = world_size // ranks
    if data_parallel_first:
        return tuple(tuple(range(rank * copies, (rank + 1) * copies)) for rank in range(ranks))
    return tuple(tuple(range(rank, world_size, ranks)) for rank in range(ranks))


def _check_stated(weights, models, paths):
    """ZeRO-3's model states say of each rank which experts it has."""
    numbers = {weight.layer: weight for weight in weights.values()}
    for rank, model in enumerate(models):
        for layer in model.get(_LAYERS) or []:
            place, copy = layer.get('ep_rank'), layer.get('expert_data_parallel_rank')
            holders = numbers[layer.get('moe_layer_id')].holders
            if not (type(place) is int and 0 <= place < len(holders) and type(copy) is int
                    and 0 <= copy < len(holders[place]) and holders[place][copy] == rank):
                raise CheckpointError(
                    f'{paths[rank]}: says that it is rank {shown(place)} of the experts, copy {shown(copy)}; '
                    f'expected one of {listed(holders)} to have {rank} there.')
