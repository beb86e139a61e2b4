# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Copies between buffers and messages, and from buffer to buffer, made once and run often."""

from dataclasses import dataclass, field
from functools import partial
from typing import Callable, Iterator, List, Sequence, Tuple

import numpy as np
import torch

from deepspeed.checkpoint.affine_geometry.runs import lower_run
from deepspeed.checkpoint.affine_geometry.strides import row_major_strides
from deepspeed.checkpoint.affine_transfer_executor.buffers import Piece, Shard
from deepspeed.checkpoint.affine_transfer_executor.dtypes import rescaled
from deepspeed.checkpoint.affine_transfer_executor.moves import FIRST_HOP, Moves

# Elements that are scaled, or addressed one by one, at one time: each takes a temporary.
TEMPORARY = 1 << 18
# Bytes of an int64.
WORD = 8


@dataclass
class Copies:
    """Copies that may run in any order.

    Attributes:
        targets, sources: pairs of views of equal shape; one call copies them all, and casts where dtypes differ.
        others: copies that are no such pair: scaled ones, and those which strides cannot express.
        numbytes: of all of them, on the wire.
    """
    targets: List[torch.Tensor] = field(default_factory=list)
    sources: List[torch.Tensor] = field(default_factory=list)
    others: List[Callable[[], None]] = field(default_factory=list)
    numbytes: int = 0

    def run(self) -> None:
        """Make all copies."""
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)
        for copy in self.others:
            copy()

    def pair(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Add a pair of views."""
        if _in_words(target, source):
            target, source = target.view(torch.int64), source.view(torch.int64)
        self.targets.append(target)
        self.sources.append(source)


def _in_words(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the bytes of a pair may be copied 8 at a time, which takes less time than 1, 2 or 4."""
    width = target.element_size()
    if width >= WORD or not target.dim() or target.dtype != source.dtype or target.shape[-1] * width % WORD:
        return False
    for view in (target, source):
        *outer, inner = view.stride()
        places = (view.data_ptr(), view.storage_offset() * width, *(stride * width for stride in outer))
        if inner != 1 or any(place % WORD for place in places) or view.is_conj() or view.is_neg():
            return False
    return True


@dataclass(frozen=True)
class Part:
    """Some elements of one move, as a box of both ends.

    Attributes:
        request, stage: of the move. width: bytes of an element on the wire.
        start: first byte in the message.
        source_rank, source, target_rank, target: the locations and where the elements stand in them.
        scales: of source and target.
    """
    request: int
    stage: int
    width: int
    start: int
    source_rank: int
    source: Piece
    target_rank: int
    target: Piece
    scales: Tuple[float, float]

    @property
    def is_scaled(self) -> bool:
        """Whether it takes arithmetic."""
        return self.scales != (1.0, 1.0)

    @property
    def numbytes(self) -> int:
        """Bytes on the wire."""
        return self.source.numel * self.width


class Buffers:
    """The buffers of this process, by what a move says of its ends.

    Args:
        requests: PreparedRequests.
        targets: per request, location -> Shard that is written: the targets themselves, or what stands in for them.
    """

    def __init__(self, requests: Sequence, targets: Sequence):
        self.requests = requests
        self.targets = targets

    def source(self, part: Part) -> Shard:
        """What a move reads."""
        if part.stage == FIRST_HOP:
            return self.requests[part.request].sources[part.source_rank]
        return self.targets[part.request][part.source_rank]

    def target(self, part: Part) -> Shard:
        """What a move writes."""
        return self.targets[part.request][part.target_rank]

    def wire_dtype(self, part: Part) -> torch.dtype:
        """dtype of the target, and of the bytes that travel."""
        return self.requests[part.request].target_dtype


def parts_of(moves: Moves, rows: np.ndarray, first: np.ndarray, last: np.ndarray) -> Iterator[Part]:
    """Elements ``[first, last)`` of moves, one behind the other. Arguments as a Message has them."""
    part = moves.take(rows)
    shapes = [tuple(shape) for shape in part.shape.tolist()]
    sources = _pieces(part.source_offset, part.source_strides, shapes)
    targets = _pieces(part.target_offset, part.target_strides, shapes)
    columns = (part.request, part.stage, part.width, part.source_rank, part.target_rank, part.source_scale,
               part.target_scale, part.numel, first, last)
    start = 0
    for source, target, row in zip(sources, targets, zip(*(column.tolist() for column in columns))):
        request, stage, width, source_rank, target_rank, source_scale, target_scale, numel, low, high = row
        boxes = [(source, target)]
        if high - low < numel:
            boxes = [(source.box(box.origin, box.extent), target.box(box.origin, box.extent))
                     for box in lower_run(source.shape, low, high)]
        for read, written in boxes:
            yield Part(request, stage, width, start, source_rank, read, target_rank, written,
                       (source_scale, target_scale))
            start += read.numel * width


def _pieces(offset: np.ndarray, strides: np.ndarray, shapes: Sequence[Tuple[int, ...]]) -> Iterator[Piece]:
    return map(Piece, offset.tolist(), map(tuple, strides.tolist()), shapes)


def pack(copies: Copies, buffers: Buffers, part: Part, message: torch.Tensor) -> None:
    """Add the copies that gather a part from where it is read: scaled, cast and dense."""
    copies.numbytes += part.numbytes
    shard, wire = buffers.source(part), buffers.wire_dtype(part)
    if not part.is_scaled:
        _between(copies, shard, part.source, _values(message, part, wire), reading=True)
        return
    scale = partial(rescaled, source_scale=part.scales[0], target_scale=part.scales[1])
    out = _values(message, part, wire)
    copies.others += [
        partial(shard.read, box, out[start:start + box.numel], scale) for start, box in _small(part.source)
    ]


def pack_target(copies: Copies, buffers: Buffers, part: Part, message: torch.Tensor) -> None:
    """Add the copies that gather a part from where it was written."""
    copies.numbytes += part.numbytes
    _between(copies, buffers.target(part), part.target, _values(message, part, buffers.wire_dtype(part)), reading=True)


def unpack(copies: Copies, buffers: Buffers, part: Part, message: torch.Tensor) -> None:
    """Add the copies that spread a part over its target."""
    copies.numbytes += part.numbytes
    _between(copies,
             buffers.target(part),
             part.target,
             _values(message, part, buffers.wire_dtype(part)),
             reading=False)


def copy(copies: Copies, buffers: Buffers, part: Part) -> None:
    """Add the copies of a part from source to target, through a temporary only where it is scaled or a side is no
    view of its buffer."""
    copies.numbytes += part.numbytes
    reader, writer = buffers.source(part), buffers.target(part)
    from_view, to_view = reader.view(part.source), writer.view(part.target)
    if from_view is not None and to_view is not None and not part.is_scaled:
        copies.pair(to_view, from_view)
        return
    scale = partial(rescaled, source_scale=part.scales[0], target_scale=part.scales[1])
    for (_, source), (_, target) in zip(_small(part.source), _small(part.target)):
        copies.others.append(partial(_through_temporary, reader, source, writer, target, scale))


def _through_temporary(reader: Shard, source: Piece, writer: Shard, target: Piece, scale) -> None:
    values = torch.empty(source.numel, dtype=writer.tensor.dtype, device=writer.tensor.device)
    reader.read(source, values, scale)
    writer.write(target, values)


def _between(copies: Copies, shard: Shard, piece: Piece, values: torch.Tensor, reading: bool) -> None:
    """Pair a piece with flat values, block by block; where it has no blocks, by its elements' addresses."""
    blocks = shard.blocks(piece)
    if blocks is None:
        for start, box in _small(piece):
            part = values[start:start + box.numel]
            copies.others.append(
                partial(shard.read, box, part, _unchanged) if reading else partial(shard.write, box, part))
        return
    start = 0
    for block in blocks:
        shape = block.shape
        dense = torch.as_strided(values, shape, row_major_strides(shape), values.storage_offset() + start)
        copies.pair(*((dense, block) if reading else (block, dense)))
        start += block.numel()


def _unchanged(values: torch.Tensor) -> torch.Tensor:
    return values


def _small(piece: Piece) -> Iterator[Tuple[int, Piece]]:
    """A piece in boxes of at most ``TEMPORARY`` elements, each with the number of elements before it."""
    for start in range(0, piece.numel, TEMPORARY):
        done = start
        for box in lower_run(piece.shape, start, min(start + TEMPORARY, piece.numel)):
            yield done, piece.box(box.origin, box.extent)
            done += box.volume


def _values(message: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
    """The part's place in a message, flat. Every part starts at a multiple of its width."""
    return message[part.start:part.start + part.numbytes].view(dtype)
