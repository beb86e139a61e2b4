# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whether buffers are still where they were when a program was made for them."""

from operator import eq
from typing import List, Sequence

import torch

from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError


class Bindings:
    """The buffers of PreparedRequests, and the memory that each of them had."""

    def __init__(self, requests: Sequence):
        held = [(f'{request.name}: {side} location {location}', shard.tensor) for request in requests
                for side, shards in (('source', request.sources), ('target', request.targets))
                for location, shard in shards.items()]
        self.names = [name for name, _ in held]
        self.tensors = [tensor for _, tensor in held]
        self._addresses, self._numels = _addresses(self.tensors), _numels(self.tensors)
        self._strides = list(map(torch.Tensor.stride, self.tensors))

    def check(self) -> None:
        """Refuse to touch buffers that were freed, resized, replaced or transposed.

        Raises:
            AffineTransferExecutionError: which one, and what it was and is.
        """
        # A storage that was freed or resized is elsewhere. No list of new objects is made: it would have the garbage
        # collector walk over the whole program in every other run.
        strides = map(torch.Tensor.stride, self.tensors)
        if self._addresses == _addresses(self.tensors) and self._numels == _numels(self.tensors) and all(
                map(eq, self._strides, strides)):
            return
        was = zip(self._addresses, self._numels, self._strides)
        for name, tensor, (address, numel, stride) in zip(self.names, self.tensors, was):
            if (tensor.data_ptr(), tensor.numel(), tensor.stride()) != (address, numel, stride):
                raise AffineTransferExecutionError(
                    f'{name} had {numel} elements at {address:#x} with strides {stride} when the program was '
                    f'compiled, and has {tensor.numel()} at {tensor.data_ptr():#x} with strides {tensor.stride()}. '
                    'Give the program its new buffers with rebind, or compile it again')


def _addresses(tensors: Sequence[torch.Tensor]) -> List[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _numels(tensors: Sequence[torch.Tensor]) -> List[int]:
    return list(map(torch.Tensor.numel, tensors))
