# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whether buffers are still where they were when a program was made for them."""

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

    def check(self) -> None:
        """Refuse to touch buffers that were freed, resized or replaced.

        Raises:
            AffineTransferExecutionError: which one, and what it was and is.
        """
        # A storage that was freed or resized is elsewhere. These lists hold numbers alone: objects would have the
        # garbage collector walk over the whole program in every other run.
        if self._addresses == _addresses(self.tensors) and self._numels == _numels(self.tensors):
            return
        now = zip(self.names, zip(self._addresses, self._numels), zip(_addresses(self.tensors), _numels(self.tensors)))
        name, was, is_ = next(entry for entry in now if entry[1] != entry[2])
        raise AffineTransferExecutionError(
            f'{name} had {was[1]} elements at {was[0]:#x} when the program was compiled, and has {is_[1]} at '
            f'{is_[0]:#x}. Give the program its new buffers with rebind, or compile it again')


def _addresses(tensors: Sequence[torch.Tensor]) -> List[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _numels(tensors: Sequence[torch.Tensor]) -> List[int]:
    return list(map(torch.Tensor.numel, tensors))
