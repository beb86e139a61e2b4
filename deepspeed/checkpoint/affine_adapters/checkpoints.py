# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Open a checkpoint on disk, whatever wrote it."""

from pathlib import Path

from deepspeed.checkpoint.affine_adapters.engine_checkpoint import engine_checkpoint
from deepspeed.checkpoint.affine_adapters.safetensors_files import safetensors_checkpoint
from deepspeed.checkpoint.affine_adapters.stored import CheckpointError, check_held
from deepspeed.checkpoint.affine_adapters.universal_checkpoint import PARAMETERS, universal_checkpoint

# No file has a longer name.
_MOST_LETTERS = 1024


def open_checkpoint(path):
    """Describe a checkpoint; nothing of its tensors is read before it is looked at.

    Args:
        path: a folder of safetensors files; of a step that a DeepSpeed engine saved, or a universal one; or the
            folder above, where the file ``latest`` names the step.

    Returns:
        ``Checkpoint``.

    Raises:
        CheckpointError: none of these, or a broken one.

    Example::

        {name: held.layout for name, held in open_checkpoint('checkpoints').parameters.items()}
    """
    try:
        checkpoint = _opened(Path(path))
        check_held(checkpoint.parameters, path)
        return checkpoint
    except CheckpointError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, OSError) as error:
        # Files are not trusted, and each of their values may be anything.
        gist = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f'{path}: holds what no checkpoint of its kind holds: {gist}') from error


def _opened(folder):
    if not folder.is_dir():
        raise CheckpointError(f'{folder}: is no folder; expected that of a checkpoint.')
    if (folder / 'latest').is_file():
        with open(folder / 'latest', errors='replace') as file:
            tag = file.read(_MOST_LETTERS).strip()
        if tag in ('', '..') or Path(tag).name != tag or not (folder / tag).is_dir():
            raise CheckpointError(f'{folder / "latest"}: names the step {tag[:100]!r}, which is no folder beside it.')
        folder = folder / tag
    if (folder / PARAMETERS).is_dir():
        return universal_checkpoint(folder)
    if any(folder.glob('*.safetensors')):
        return safetensors_checkpoint(folder)
    if any(folder.glob('*_states.pt')):
        return engine_checkpoint(folder)
    raise CheckpointError(
        f'{folder}: is no checkpoint that this library reads: it has no *.safetensors, no '
        f'*_states.pt and no {PARAMETERS}/. In it: {sorted(path.name for path in folder.iterdir())[:5]}')
