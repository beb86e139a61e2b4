# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One strided block of a parameter, and where it lies in a shard."""

import math
from dataclasses import dataclass
from itertools import product

import torch

from deepspeed.checkpoint.affine.checks import integer, integers, is_invertible, shown


@dataclass(frozen=True, slots=True, repr=False)
class AffinePiece:
    """A block that some locations hold: its place in the full parameter and its place in their shards.

    Offsets and strides are in elements, as ``torch.as_strided`` takes them: *source* addresses the flat parameter,
    *dest* the flat shard. One sequence of sizes serves both sides, so element ``i`` of the block is the same element
    on either.

    Args:
        shape: sizes of the block, N of them.
        source_offset: address of the block's first element in the flat parameter.
        source_strides: N steps in the flat parameter.
        dest_offset: address of the block's first element in the flat shard.
        dest_strides: N steps in the flat shard.
        locations: ids of all locations that hold this block.
        scale: what the shard multiplies the parameter by, ``shard == full * scale``; finite and not zero.

    Whether a piece fits into a shard is a question to its map.

    Raises:
        ValueError: a scale that cannot be undone.
        TypeError: numbers that are no integers.

    Example: rows 2 and 3 of a 4 x 3 parameter, held by location 1 as a 2 x 3 shard::

        >>> AffinePiece((2, 3), 6, (3, 1), 0, (3, 1), [1]).numel
        6
    """
    shape: tuple
    source_offset: int
    source_strides: tuple
    dest_offset: int
    dest_strides: tuple
    locations: frozenset
    scale: float = 1.0

    def __post_init__(self):
        try:
            scale = float(self.scale)
        except OverflowError:
            # An int beyond every float.
            scale = math.inf
        if not is_invertible(scale):
            raise ValueError(
                f'A scale of {shown(self.scale)} is not invertible: the parameter could not be rebuilt from such a '
                'shard. Give a finite factor other than zero.')
        # The class is frozen, so its own normalisation has to go past __setattr__.
        put = object.__setattr__
        put(self, 'shape', integers(self.shape, 'shape'))
        put(self, 'source_offset', integer(self.source_offset, 'source_offset'))
        put(self, 'source_strides', integers(self.source_strides, 'source_strides'))
        put(self, 'dest_offset', integer(self.dest_offset, 'dest_offset'))
        put(self, 'dest_strides', integers(self.dest_strides, 'dest_strides'))
        put(self, 'locations', frozenset(integers(self.locations, 'locations')))
        put(self, 'scale', scale)

    @property
    def numel(self):
        """Number of elements of the block."""
        return math.prod(self.shape)

    def source_view(self, full_param):
        """Return the block as a view of the full parameter, a flat tensor. Nothing is copied."""
        return strided_view(full_param, self.shape, self.source_offset, self.source_strides)

    def dest_view(self, shard):
        """Return the block as a view of the shard that holds it, a flat tensor. Nothing is copied."""
        return strided_view(shard, self.shape, self.dest_offset, self.dest_strides)

    def source_offsets(self):
        """Yield the address in the flat parameter of every element, in row-major order of the block."""
        axes = [
            range(0, size * stride, stride) if stride else [0] * size
            for size, stride in zip(self.shape, self.source_strides, strict=True)
        ]
        for steps in product(*axes):
            yield self.source_offset + sum(steps)

    def __repr__(self):
        scaled = '' if self.scale == 1.0 else f', scale={self.scale}'
        return (f'AffinePiece(shape={self.shape}, source=({self.source_offset}, {self.source_strides}), '
                f'dest=({self.dest_offset}, {self.dest_strides}), locations={sorted(self.locations)}{scaled})')


def check_tensor(value, what):
    """Raise ``TypeError`` unless ``value`` is a tensor; ``what`` names it in messages."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f'{what} must be a torch.Tensor, but it is {shown(value)}.')


def strided_view(flat, shape, offset, strides):
    """Return a strided block of a flat tensor as a view; ``offset`` and ``strides`` count elements of ``flat``.

    ``torch.as_strided`` counts from the start of the storage and in its steps. Here ``flat`` may itself be a view into
    a larger buffer, with any step: a shard that was split off, an expanded row. A tensor of more axes stands for its
    elements in row-major order and must be contiguous.
    """
    check_tensor(flat, 'The buffer of a block')
    if flat.dim() == 1:
        step = flat.stride(0)
    elif flat.is_contiguous():
        step = 1
    else:
        raise ValueError(f'A block addresses a flat tensor, but this one has shape {tuple(flat.shape)} and strides '
                         f'{flat.stride()}; pass tensor.reshape(-1).')
    return torch.as_strided(flat, shape, [stride * step for stride in strides], flat.storage_offset() + offset * step)
