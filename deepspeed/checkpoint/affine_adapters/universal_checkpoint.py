# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps and memory-mapped tensors of a universal checkpoint, which has every parameter whole."""

from pathlib import Path

import torch

from deepspeed.checkpoint.affine.constructors import replicated_map
from deepspeed.checkpoint.affine_adapters.held import HeldParameter
from deepspeed.checkpoint.affine_adapters.stored import Checkpoint, CheckpointError
from deepspeed.checkpoint.affine_adapters.torch_files import load_mapped

PARAMETERS, WEIGHTS = 'zero', 'fp32.pt'


def universal_checkpoint(folder):
    """Describe the master weights in the folder that ``ds_to_universal`` wrote.

    Args:
        folder: with a folder ``zero`` in it, which has one folder for each parameter.

    Returns:
        ``Checkpoint`` over location 0. Frozen parameters and buffers are in it where the model states have them.

    Raises:
        CheckpointError: missing or broken files.

    Example::

        universal_checkpoint('checkpoints/global_step10_universal').parameters['lm_head.weight'].buffers[0]
    """
    folder = Path(folder)
    held = {}
    for path in sorted((folder / PARAMETERS).glob(f'*/{WEIGHTS}')):
        content = load_mapped(path)
        # A parameter of ZeRO-3 without tensor parallelism has nothing around it.
        tensor = content.get('param') if isinstance(content, dict) else content
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f'{path}: holds no tensor under "param".')
        held[path.parent.name] = _whole(tensor)
    if not held:
        raise CheckpointError(f'{folder}: has no {PARAMETERS}/*/{WEIGHTS}. Did the conversion end?')
    for path in sorted(folder.glob('mp_rank_00_model_states.pt')):
        for name, tensor in (load_mapped(path).get('module') or {}).items():
            if name not in held and tensor.numel():
                held[name] = _whole(tensor)
    return Checkpoint('universal', held, {})


def _whole(tensor):
    return HeldParameter(replicated_map(tuple(tensor.shape), 1), {0: tensor}, tensor.dtype)
