# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A tensor addressed through its own row-major order, whatever its strides are."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import List, Optional, Tuple

import torch

from deepspeed.checkpoint.affine_geometry.runs import lower_run
from deepspeed.checkpoint.affine_geometry.strides import row_major_strides
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError


@dataclass(frozen=True)
class Piece:
    """A strided region of a flat shard: ``torch.as_strided`` arguments, in elements."""
    offset: int
    strides: Tuple[int, ...]
    shape: Tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    def box(self, origin: Tuple[int, ...], extent: Tuple[int, ...]) -> 'Piece':
        """The sub-region at these coordinates."""
        start = self.offset + sum(low * stride for low, stride in zip(origin, self.strides))
        return Piece(start, self.strides, extent)


class Shard:
    """One location's buffer.

    A piece addresses the row-major order of the tensor, which for a non-contiguous tensor is not the order
    of its storage.

    Args:
        tensor: any strided tensor.

    Raises:
        AffineTransferExecutionError: no strided tensor with memory of its own.

    Example::

        shard = Shard(torch.arange(12).view(3, 4).t())
        out = torch.empty(2, dtype=torch.int64)
        shard.read(Piece(1, (1, ), (2, )), out, lambda values: values)  # out is [4, 8]
    """

    def __init__(self, tensor: torch.Tensor):
        if not isinstance(tensor, torch.Tensor):
            raise AffineTransferExecutionError(f'buffer is a {type(tensor).__name__}; expected a tensor')
        # Such as DTensors and fake tensors: what has the memory, if anything, is another tensor.
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.is_nested:
            raise AffineTransferExecutionError(f'buffer is a {type(tensor).__name__} that wraps other tensors; give '
                                               'the local tensor itself, such as that of to_local()')
        if tensor.layout != torch.strided or tensor.device.type == 'meta' or tensor.is_quantized:
            raise AffineTransferExecutionError(f'buffer of layout {tensor.layout} on {tensor.device}; expected a '
                                               'strided tensor in memory')
        held = tensor.untyped_storage().nbytes()
        if tensor.numel() and (tensor.storage_offset() + _extent(tensor)) * tensor.element_size() > held:
            raise AffineTransferExecutionError(f'buffer of shape {tuple(tensor.shape)} has a storage of {held} bytes, '
                                               'too few for it: its memory was freed or resized')
        self.tensor = tensor

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.tensor.numel()

    @cached_property
    def _contiguous(self) -> bool:
        return self.tensor.is_contiguous()

    @cached_property
    def _grid(self) -> Tuple[Tuple[int, ...], Tuple[int, ...], Tuple[int, ...]]:
        """Sizes, row-major strides and storage strides of the tensor, neighbouring axes merged where they are
        dense with respect to each other."""
        sizes: List[int] = []
        storage: List[int] = []
        for size, stride in zip(self.tensor.shape, self.tensor.stride()):
            if size == 1:
                continue
            if sizes and storage[-1] == stride * size:
                sizes[-1] *= size
                storage[-1] = stride
            else:
                sizes.append(size)
                storage.append(stride)
        return tuple(sizes), row_major_strides(sizes), tuple(storage)

    def view(self, piece: Piece) -> Optional[torch.Tensor]:
        """The piece as a view of the tensor, in the piece's shape, or None where strides cannot express it."""
        if self._contiguous:
            return self._storage_view(piece.offset, piece.strides, piece.shape)
        sizes, logical, storage = self._grid
        room = []
        start = 0
        rest = piece.offset
        for size, step, stride in zip(sizes, logical, storage):
            coordinate, rest = divmod(rest, step)
            room.append(size - 1 - coordinate)
            start += coordinate * stride
        strides = []
        for size, stride in zip(piece.shape, piece.strides):
            axis = _axis_of(stride, logical) if size > 1 and stride else None
            if axis is None:
                if size > 1 and stride:
                    return None
                strides.append(0)
                continue
            step = stride // logical[axis]
            room[axis] -= (size - 1) * step
            strides.append(step * storage[axis])
        if any(left < 0 for left in room):
            return None
        return self._storage_view(start, strides, piece.shape)

    def blocks(self, piece: Piece) -> Optional[List[torch.Tensor]]:
        """The piece as views which follow one another in its row-major order, or None."""
        whole = self.view(piece)
        if whole is not None:
            return [whole]
        run = as_run(piece)
        if run is None:
            return None
        sizes, logical, _ = self._grid
        grid = Piece(0, logical, sizes)
        return [self.view(grid.box(box.origin, box.extent)) for box in lower_run(sizes, *run)]

    def read(self, piece: Piece, out: torch.Tensor, transform) -> None:
        """Write ``transform`` of the piece's values, cast, into the flat tensor ``out``."""
        blocks = self.blocks(piece)
        if blocks is None:
            values = self._bytes().index_select(0, self._index(piece)).view(-1).view(self.tensor.dtype)
            # Views that are lazily conjugated or negated say so beside their bytes.
            values = values.conj() if self.tensor.is_conj() else values
            values = values.neg() if self.tensor.is_neg() else values
            out.copy_(transform(values))
            return
        start = 0
        for block in blocks:
            out[start:start + block.numel()].view(block.shape).copy_(transform(block))
            start += block.numel()

    def write(self, piece: Piece, values: torch.Tensor) -> None:
        """Write flat values of the tensor's own dtype to the piece."""
        blocks = self.blocks(piece)
        if blocks is None:
            rows = values.to(self.tensor.device).contiguous().view(torch.uint8).view(piece.numel, -1)
            self._bytes().index_copy_(0, self._index(piece), rows)
            return
        start = 0
        for block in blocks:
            block.copy_(values[start:start + block.numel()].view(block.shape))
            start += block.numel()

    def _storage_view(self, offset, strides, shape) -> torch.Tensor:
        return torch.as_strided(self.tensor, shape, strides, self.tensor.storage_offset() + offset)

    def _bytes(self) -> torch.Tensor:
        """The storage from the first to the last element of the tensor, one row of bytes per element."""
        extent = _extent(self.tensor)
        return self._storage_view(0, (1, ), (extent, )).view(torch.uint8).view(extent, -1)

    def _index(self, piece: Piece) -> torch.Tensor:
        """int64[numel], storage positions of the piece's elements. It takes several times the memory of the elements:
        callers read and write a large piece in parts."""
        _, logical, storage = self._grid
        rest = torch.arange(piece.numel, device=self.tensor.device)
        address = torch.full_like(rest, piece.offset)
        for size, stride in zip(reversed(piece.shape), reversed(piece.strides)):
            address += rest % size * stride
            rest = rest // size
        index = torch.zeros_like(address)
        for step, stride in zip(logical, storage):
            index += address // step * stride
            address = address % step
        return index


def _extent(tensor: torch.Tensor) -> int:
    """Elements of the storage from the first to the last one of a tensor that has any."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


def _axis_of(stride: int, logical: Tuple[int, ...]) -> Optional[int]:
    """The axis along which this step stays, if it is a whole number of that axis' steps."""
    for axis, step in enumerate(logical):
        if stride >= step:
            return axis if stride % step == 0 else None
    return None


def as_run(piece: Piece) -> Optional[Tuple[int, int]]:
    """``[start, stop)`` if the piece is one dense run of addresses in row-major order, else None."""
    expected = 1
    for size, stride in zip(reversed(piece.shape), reversed(piece.strides)):
        if size > 1 and stride != expected:
            return None
        expected *= size
    return piece.offset, piece.offset + expected
