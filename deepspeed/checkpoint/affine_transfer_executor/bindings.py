# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whether buffers are still where they were when a program was made for them."""

from dataclasses import dataclass
from typing import Sequence, Tuple

import torch

from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError


@dataclass(frozen=True, eq=False)
class Bindings:
    """Buffers and the memory that each of them had; ``names`` are how messages call them."""
    names: Sequence[str]
    tensors: Sequence[torch.Tensor]
    found: Sequence[Tuple]

    @classmethod
    def of(cls, requests: Sequence) -> 'Bindings':
        """All buffers of PreparedRequests."""
        held = [(f'{request.name}: {side} location {location}', shard.tensor) for request in requests
                for side, shards in (('source', request.sources), ('target', request.targets))
                for location, shard in shards.items()]
        tensors = [tensor for _, tensor in held]
        return cls([name for name, _ in held], tensors, [_memory(tensor) for tensor in tensors])

    def check(self) -> None:
        """Refuse to touch buffers that were freed, resized or replaced.

        Raises:
            AffineTransferExecutionError: which one, and what it was and is.
        """
        now = [_memory(tensor) for tensor in self.tensors]
        if now == self.found:
            return
        name, was, is_ = next(entry for entry in zip(self.names, self.found, now) if entry[1] != entry[2])
        raise AffineTransferExecutionError(f'{name} was {_described(was)} when the program was compiled, and is '
                                           f'{_described(is_)}. Give the program its new buffers with rebind, or '
                                           'compile it again')


def _memory(tensor: torch.Tensor) -> Tuple:
    return tensor.data_ptr(), tensor.untyped_storage().nbytes(), tensor.shape, tensor.stride(), tensor.dtype


def _described(memory: Tuple) -> str:
    address, numbytes, shape, strides, dtype = memory
    return (f'{dtype} of shape {tuple(shape)} and strides {tuple(strides)} at {address:#x}, in a storage of '
            f'{numbytes} bytes')
