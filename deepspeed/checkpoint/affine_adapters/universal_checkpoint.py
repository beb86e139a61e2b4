# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps and memory-mapped tensors of a universal checkpoint, which has every parameter whole."""

from pathlib import Path

import torch

from deepspeed.checkpoint.affine_adapters.module_states import (buffers_of, frozen_of, left_out, trained_shapes,
                                                                with_whole)
from deepspeed.checkpoint.affine_adapters.rank_files import rank_files
from deepspeed.checkpoint.affine_adapters.stored import Checkpoint, CheckpointError, whole
from deepspeed.checkpoint.affine_adapters.torch_files import load_mapped

PARAMETERS, WEIGHTS = 'zero', 'fp32.pt'


def universal_checkpoint(folder):
    """Describe the master weights in the folder that ``ds_to_universal`` wrote.

    Args:
        folder: with a folder ``zero`` in it, which has one folder for each parameter.

    Returns:
        ``Checkpoint``; location 0 has trained parameters and buffers whole. Frozen parameters are as the model states
        have them, and are left out where those are tensor-parallel.

    Raises:
        CheckpointError: missing or broken files.

    Example::

        universal_checkpoint('checkpoints/global_step10_universal').parameters['lm_head.weight'].buffers[0]
    """
    folder = Path(folder)
    trained = {}
    for path in sorted((folder / PARAMETERS).glob(f'*/{WEIGHTS}')):
        content = load_mapped(path)
        # A parameter of ZeRO-3 without tensor parallelism has nothing around it.
        tensor = content.get('param') if isinstance(content, dict) else content
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f'{path}: holds no tensor under "param".')
        trained[path.parent.name] = tensor.detach()
    if not trained:
        raise CheckpointError(f'{folder}: has no {PARAMETERS}/*/{WEIGHTS}. Did the conversion end?')
    if not any(folder.glob('*_model_states.pt')):
        return Checkpoint('universal', {name: whole(tensor) for name, tensor in trained.items()}, {})
    return _with_model_states(rank_files(folder), trained)


def _with_model_states(files, trained):
    """Add what is not trained, from the model states that the converter copied."""
    model = files.model_states(0, 0)
    shapes = trained_shapes(model)
    alone = files.tensor_parallel == 1
    cut = {
        # ZeRO-3's parameters are written flat where no tensor-parallel shards or experts were put together.
        name: whole(tensor.view(shapes[name]) if alone and name in shapes and tensor.dim() == 1 else tensor)
        for name, tensor in trained.items()
    }
    rest = buffers_of(model)
    if alone and files.cuts_module:
        cut.update(frozen_of(files, 0, [files.model_states(0, rank) for rank in range(len(files.model))]))
    elif alone:
        rest = model.get('module') or {}
    held = with_whole(model, cut, rest)
    return Checkpoint('universal', held, left_out(model, held))
