# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a checkpoint on disk holds, in the form in which the adapters describe a live model."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Dict

import torch

from deepspeed.checkpoint.affine.constructors import replicated_map
from deepspeed.checkpoint.affine_adapters.held import HeldParameter


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


def whole(tensor: torch.Tensor) -> HeldParameter:
    """A tensor that lies whole in one file, at location 0. Tensors of equal shape share their map."""
    return HeldParameter(_whole_map(tuple(tensor.shape)), {0: tensor}, tensor.dtype)


@lru_cache(maxsize=4096)
def _whole_map(shape):
    return replicated_map(shape, 1)
