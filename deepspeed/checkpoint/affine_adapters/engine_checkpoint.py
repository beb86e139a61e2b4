# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps and memory-mapped tensors of what ``save_checkpoint`` of a DeepSpeed engine wrote."""

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Dict, Optional

from deepspeed.checkpoint.affine.checks import shown
from deepspeed.checkpoint.affine.composition import compose
from deepspeed.checkpoint.affine.constructors import replicated_map
from deepspeed.checkpoint.affine.envelope import load_affine_maps
from deepspeed.checkpoint.affine_adapters.expert_files import (check_experts, expert_weights, flat_experts,
                                                               single_experts, zero3_experts)
from deepspeed.checkpoint.affine_adapters.held import HeldParameter
from deepspeed.checkpoint.affine_adapters.module_states import (begins_as, buffers_of, first_of, frozen_of, left_out,
                                                                trained_shapes, with_whole)
from deepspeed.checkpoint.affine_adapters.rank_files import RankFiles, rank_files
from deepspeed.checkpoint.affine_adapters.stored import Checkpoint, CheckpointError
from deepspeed.checkpoint.affine_adapters.zero_files import flat_trained, zero3_trained


def engine_checkpoint(folder):
    """Describe the weights in the folder of one saved step: with ZeRO-1, 2, 3 or without, with AutoTP, AutoEP or
    neither.

    Trained parameters are the optimizer's master weights, usually in float32; frozen parameters and buffers are as
    the module holds them. Without ZeRO all are the module's. Location ``t * W + d`` stands for data-parallel rank d,
    of W, in tensor-parallel rank t.

    Args:
        folder: the one with files such as ``zero_pp_rank_0_mp_rank_00_optim_states.pt`` in it.

    Returns:
        ``Checkpoint``.

    Raises:
        CheckpointError: missing, truncated or contradictory files, naming them; tensor-parallel shards without maps;
            checkpoints of pipeline stages, of experts beside AutoTP, or of experts that AutoEP has not placed.

    Example::

        engine_checkpoint('checkpoints/global_step10').parameters['lm_head.weight'].layout
    """
    files = rank_files(folder)
    shards = [_read_shard(files, rank) for rank in range(files.tensor_parallel)]
    if len(shards) == 1:
        return Checkpoint(shards[0].kind, shards[0].held, shards[0].left_out)
    maps = _maps(shards, files)
    held = {}
    for name, first in shards[0].held.items():
        held[name] = replace(held[first.tied_to], tied_to=first.tied_to) if first.tied_to else _joined(
            name, shards, _map_of(name, maps, shards, files), files)
    return Checkpoint(f'{shards[0].kind}, tensor-parallel over {len(shards)}', held, shards[0].left_out)


@dataclass(frozen=True, eq=False)
class _Shard:
    """What one tensor-parallel rank holds, over locations 0 to ``world_size - 1``, and the maps that it saved;
    ``model`` are its model states."""
    kind: str
    world_size: int
    held: Dict[str, HeldParameter]
    left_out: Dict[str, str]
    model: dict

    @property
    def maps(self) -> Optional[dict]:
        return (self.model.get('universal_checkpoint_info') or {}).get('affine_map')


def _read_shard(files: RankFiles, rank):
    model, path = files.model_states(rank, 0), files.model_path(rank, 0)
    if not files.has_optimizer:
        experts = single_experts(_experts(files, model, 1, path), files)
        return _Shard('without ZeRO', 1, with_whole(model, experts, model.get('module') or {}), {}, model)
    first = files.optimizer_states(rank, 0)
    world_size = _world_size(first, files.optimizer_path(rank, 0))
    ranks = range(world_size)
    states = [first] + [files.optimizer_states(rank, data_rank) for data_rank in ranks[1:]]
    paths = [files.optimizer_path(rank, data_rank) for data_rank in ranks]
    experts = _experts(files, model, world_size, path)
    # DeepSpeed's optimizer for bfloat16, which is a ZeRO-1, does not say so.
    stage = int(getattr(first.get('zero_stage'), 'value', first.get('zero_stage')) or 1)
    kind = f'ZeRO-{stage} over {world_size}'
    if experts:
        kind += f', experts over {len(next(iter(experts.values())).holders)}'
    if stage != 3:
        return _Shard(kind, world_size, _flat_held(files, model, path, states, paths, experts), {}, model)
    models = [model] + [files.model_states(rank, data_rank) for data_rank in ranks[1:]]
    held = _zero3_held(files, rank, models, states, paths, experts)
    return _Shard(kind, world_size, held, left_out(model, held), model)


def _flat_held(files, model, path, states, paths, experts):
    """What ZeRO-1 or 2 cut, and what they did not."""
    module = model.get('module') or {}
    shapes = {name: shape for name, shape in trained_shapes(model).items() if name not in experts}
    trained = flat_trained(shapes, states, paths)
    _check_places(trained, module, path)
    single, placed = single_experts(experts, files), flat_experts(experts, states, paths)
    check_experts(placed, single, experts, path)
    return with_whole(model, {**trained, **single, **placed}, module)


def _zero3_held(files, rank, models, states, paths, experts):
    """What ZeRO-3 cut, and buffers."""
    copies = {name: one.copies for name, one in experts.items()}
    trained = zero3_trained(trained_shapes(models[0]), states, paths, copies)
    placed = zero3_experts(experts, models, states, paths) if experts else {}
    return with_whole(models[0], {**trained, **placed, **frozen_of(files, rank, models)}, buffers_of(models[0]))


def _experts(files, model, world_size, path):
    weights = expert_weights(model, world_size, path)
    if (files.experts or model.get('num_experts')) and not weights:
        raise CheckpointError(
            f'{path}: has experts that AutoEP has not placed, of which nobody can tell which rank '
            'trains which. Convert the checkpoint with deepspeed.checkpoint.ds_to_universal and pass '
            'the universal one.')
    if weights and files.tensor_parallel > 1:
        raise CheckpointError(f'{path}: experts beside tensor parallelism are not read from here. Convert the '
                              'checkpoint with deepspeed.checkpoint.ds_to_universal and pass the universal one.')
    return weights


def _any(values):
    return next(iter(values.values()))


def _world_size(state, path):
    """Data-parallel ranks; experts are cut over fewer of them."""
    counts = state.get('partition_count')
    counts = counts if isinstance(counts, list) and counts else [counts]
    if any(type(count) is not int or count < 1 for count in counts):
        raise CheckpointError(
            f'{path}: partition_count is {shown(state.get("partition_count"))}; expected the numbers of '
            'ranks that each group of parameters is cut over.')
    return max(counts)


def _check_places(trained, module, path):
    """DeepSpeed 0.19.8 notes places of parameters that are wrong where ``round_robin_gradients`` has reordered them;
    the module's own copy shows it."""
    for name, held in trained.items():
        if name in module and module[name].numel() == held.layout.numel:
            master = held.buffers[min(held.buffers)]
            if not begins_as(master, module[name]):
                raise CheckpointError(
                    f'{path}: the optimizer begins parameter {name!r} with '
                    f'{first_of(master).item():g}, the module with {first_of(module[name]).item():g}. '
                    'With round_robin_gradients DeepSpeed saves wrong places of parameters; train and '
                    'save without it.')


def _maps(shards, files):
    """``{pattern: map}`` of the tensor-parallel shards."""
    if shards[0].maps is None:
        raise CheckpointError(f'{files.folder}: is tensor-parallel over {len(shards)} ranks but has no affine maps, '
                              'without which nobody can tell how its shards fit together. DeepSpeed saves them with '
                              'AutoTP since 0.19.8.')
    if len({shard.world_size for shard in shards}) > 1:
        raise CheckpointError(f'{files.folder}: its tensor-parallel ranks have {[one.world_size for one in shards]} '
                              'data-parallel ranks.')
    try:
        return load_affine_maps(shards[0].maps)
    except ValueError as error:
        raise CheckpointError(f'{files.model_path(0, 0)}: {error}') from error


def _map_of(name, maps, shards, files):
    found = [one for pattern, one in maps.items() if re.match(pattern, name)]
    if not found and name in (shards[0].model.get('buffer_names') or []):
        # AutoTP describes parameters; buffers are whole on every rank.
        return replicated_map(shards[0].held[name].layout.logical_shape, len(shards))
    if len(found) != 1:
        raise CheckpointError(f'{files.folder}: {len(found)} affine maps match parameter {name!r}; expected one.')
    return found[0]


def _joined(name, shards, outer, files):
    inner, buffers, stride = {}, {}, shards[0].world_size
    for rank, shard in enumerate(shards):
        if name not in shard.held:
            if prod(outer.shard_shapes.get(rank, (0, ))):
                raise CheckpointError(f'{files.folder}: tensor-parallel rank {rank} holds nothing of {name!r}.')
            continue
        one = shard.held[name]
        moved = one.relabelled({location: rank * stride + location for location in one.layout.shard_shapes})
        inner[rank] = moved.layout
        buffers.update(moved.buffers)
    try:
        layout = compose(outer, inner)
    except ValueError as error:
        raise CheckpointError(f'{files.folder}: parameter {name!r}: {error}') from error
    return HeldParameter(layout, buffers, shards[0].held[name].dtype)
