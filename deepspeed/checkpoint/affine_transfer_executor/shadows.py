# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A second copy of the targets, which receives in their place until everything has arrived everywhere."""

from typing import Dict, List, Sequence, Tuple

import numpy as np
import torch

from deepspeed.checkpoint.affine_transfer_executor.buffers import Shard
from deepspeed.checkpoint.affine_transfer_executor.moves import Moves


class Shadows:
    """Shadows of all target buffers that a batch writes on this process.

    Args:
        requests: PreparedRequests.
        moves: of this process.
        rank: this process.
    """

    def __init__(self, requests: Sequence, moves: Moves, rank: int):
        written = _written(moves, rank)
        self.shards: List[Dict[int, Shard]] = []
        self._pairs: List[Tuple[torch.Tensor, torch.Tensor]] = []
        self._partly: List[Tuple[torch.Tensor, torch.Tensor]] = []
        for index, request in enumerate(requests):
            shadows = {}
            for location, shard in request.targets.items():
                if (index, location) not in written:
                    continue
                target = shard.tensor
                shadow = torch.empty(target.shape, dtype=target.dtype, device=target.device)
                shadows[location] = Shard(shadow)
                self._pairs.append((target, shadow))
                if written[index, location] != target.numel():
                    self._partly.append((target, shadow))
            self.shards.append(shadows)

    @property
    def numbytes(self) -> int:
        """Bytes of all shadows."""
        return sum(shadow.numel() * shadow.element_size() for _, shadow in self._pairs)

    def begin(self) -> None:
        """Take over what the transfer will not write."""
        for target, shadow in self._partly:
            shadow.copy_(target)

    def switch(self) -> None:
        """Make the shadows' values the targets'."""
        if self._pairs:
            targets, shadows = zip(*self._pairs)
            torch._foreach_copy_(list(targets), list(shadows))


def _written(moves: Moves, rank: int) -> Dict[Tuple[int, int], int]:
    """Elements that moves write, by request and target location."""
    mine = np.flatnonzero(moves.target_process == rank)
    written: Dict[Tuple[int, int], int] = {}
    for request, location, numel in zip(moves.request[mine].tolist(), moves.target_rank[mine].tolist(),
                                        moves.numel[mine].tolist()):
        written[request, location] = written.get((request, location), 0) + numel
    return written
