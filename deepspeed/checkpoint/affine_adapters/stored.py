# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a checkpoint on disk holds, in the form in which the adapters describe a live model."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Dict

import torch

from deepspeed.checkpoint.affine.checks import shown
from deepspeed.checkpoint.affine.constructors import replicated_map
from deepspeed.checkpoint.affine_adapters.held import HeldParameter

# Bytes that a tensor may have which repeats elements of the file.
_MOST_EXPANDED = 1 << 28


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: which file, what was found, what to do."""


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoint:
    """The parameters and buffers of a model on disk.

    Attributes:
        kind: what wrote it, in words, such as ``'ZeRO-3 over 4, tensor-parallel over 2'``.
        parameters: name -> ``HeldParameter`` whose buffers are all there, as views of mapped files: nothing is read
            before it is looked at.
        left_out: names of the model's tensors of which the files hold nothing -> why.
    """
    kind: str
    parameters: Dict[str, HeldParameter]
    left_out: Dict[str, str]

    def __repr__(self) -> str:
        return f'Checkpoint: {self.kind}, {len(self.parameters)} parameters and buffers'


def check_regular(path):
    """Raise CheckpointError if something else than a file has this name: opening a pipe may wait for ever."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise CheckpointError(f'{path}: is no regular file.')


def check_held(held, folder):
    """Raise CheckpointError unless all names are strings and all tensors plain values of files.

    Args:
        held: name -> ``HeldParameter``. folder: where they are from.
    """
    for name, one in held.items():
        if not isinstance(name, str):
            raise CheckpointError(f'{folder}: has a parameter whose name is {shown(name)}; expected a string.')
        for tensor in one.buffers.values():
            if not _is_plain(tensor):
                raise CheckpointError(f'{folder}: parameter {name!r} is no plain tensor with all of its elements in '
                                      'the file, but quantized, sparse, a view that computes, or one that repeats a '
                                      'few elements very often.')


def _is_plain(tensor):
    return (tensor.layout == torch.strided and tensor.device.type == 'cpu' and not tensor.is_quantized
            and not tensor.is_conj() and not tensor.is_neg() and not tensor.is_nested
            and tensor.nbytes <= max(tensor.untyped_storage().nbytes(), _MOST_EXPANDED))


def whole(tensor: torch.Tensor) -> HeldParameter:
    """A tensor that lies whole in one file, at location 0. Tensors of equal shape share their map."""
    return HeldParameter(_whole_map(tuple(tensor.shape)), {0: tensor}, tensor.dtype)


@lru_cache(maxsize=4096)
def _whole_map(shape):
    return replicated_map(shape, 1)
