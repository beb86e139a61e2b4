# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checksums that tell bytes which changed, and bytes which changed places.

The checksum of n words (of one element each, 8 bytes at most) is the sum of word times weight, modulo 2**64. The
weight of a word is odd and follows from its place by a mixing function (splitmix64, Steele, Lea and Flood 2014), so
that words which change places do not cancel.
"""

from functools import lru_cache
from typing import Sequence, Tuple

import numpy as np
import torch

# Words that are multiplied at one time; each takes 8 bytes.
BLOCK = 1 << 14
# By bytes of an element: an integer dtype for its bits, or for half of them.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Checksums:
    """Takes checksums of bytes on one device.

    Its temporary memory, 256 KiB, is made once: many of its size, freed one by one, would scatter over the heap.

    Example::

        Checksums(torch.device('cpu')).of(torch.tensor([1, 2], dtype=torch.uint8), [(0, 2, 1)])
    """

    def __init__(self, device: torch.device):
        self._weights = torch.from_numpy(_weights(BLOCK)).to(device)
        self._products = torch.empty_like(self._weights)

    def of(self, data: torch.Tensor, runs: Sequence[Tuple[int, int, int]]) -> torch.Tensor:
        """One checksum for each run of bytes.

        Args:
            data: uint8, contiguous.
            runs: ``(start, stop, width)``, bytes, and bytes of an element; ``start`` is a multiple of ``width``.

        Returns:
            int64[len(runs)], where ``data`` is.
        """
        sums = torch.zeros(len(runs), dtype=torch.int64, device=data.device)
        for index, (start, stop, width) in enumerate(runs):
            self._add(sums[index], data[start:stop].view(WORDS[width]))
        return sums

    def _add(self, total: torch.Tensor, words: torch.Tensor) -> None:
        blocks = -(-len(words) // BLOCK)
        # Blocks are weighted like words.
        for block, factor in enumerate(_weights(blocks).tolist()):
            part = words[block * BLOCK:(block + 1) * BLOCK]
            product = self._products[:len(part)]
            product.copy_(part).mul_(self._weights[:len(part)])
            total.add_(product.sum(), alpha=factor)


@lru_cache(maxsize=8)
def _weights(count: int) -> np.ndarray:
    """int64[count], odd."""
    with np.errstate(over='ignore'):
        mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)
