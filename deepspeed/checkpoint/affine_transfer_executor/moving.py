# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Move the values: between shards and messages, and from shard to shard on one process."""

from dataclasses import dataclass
from functools import partial
from typing import Sequence, Tuple

import torch

from deepspeed.checkpoint.affine_geometry.runs import lower_run
from deepspeed.checkpoint.affine_transfer_executor.aliases import stays
from deepspeed.checkpoint.affine_transfer_executor.buffers import Piece
from deepspeed.checkpoint.affine_transfer_executor.dtypes import rescaled
from deepspeed.checkpoint.affine_transfer_executor.schedule import Link


@dataclass(frozen=True)
class Message:
    """The bytes of one link in one round.

    Attributes:
        link: where they go, or come from.
        start, stop: which bytes of the link's stream they are.
        data: uint8[stop - start], staging memory.
    """
    link: Link
    start: int
    stop: int
    data: torch.Tensor


def pack(message: Message, requests: Sequence) -> None:
    """Gather the message from source shards: scaled, cast and dense."""
    columns = [request.columns for request in requests]
    for part in message.link.parts(message.start, message.stop, columns):
        request = requests[part.request]
        scale = partial(rescaled,
                        source_scale=float(request.columns.source_scale[part.segment]),
                        target_scale=float(request.columns.target_scale[part.segment]))
        shard = request.sources[int(request.columns.source_rank[part.segment])]
        shard.read(part.source, _values(message, part, request), scale)


def unpack(message: Message, requests: Sequence) -> None:
    """Spread the message over target shards."""
    columns = [request.columns for request in requests]
    for part in message.link.parts(message.start, message.stop, columns):
        request = requests[part.request]
        shard = request.targets[int(request.columns.target_rank[part.segment])]
        shard.write(part.target, _values(message, part, request))


def _values(message: Message, part, request) -> torch.Tensor:
    stop = part.start + part.source.numel * request.width
    return message.data[part.start:stop].view(request.target_dtype)


def copy_locally(request, segments: Sequence[int], most_elements: int) -> Tuple[int, int]:
    """Make the copies of one request that stay on this process.

    Args:
        request: a PreparedRequest.
        segments: indices of its segments.
        most_elements: elements in a temporary, where one is needed.

    Returns:
        Bytes copied, and bytes that were already in their place.
    """
    copied = in_place = 0
    for index in segments:
        segment = request.columns.segment(int(index))
        if stays(request, segment):
            in_place += segment.numel * request.width
            continue
        _copy(request, segment, most_elements)
        copied += segment.numel * request.width
    return copied, in_place


def _copy(request, segment, most_elements: int) -> None:
    """Copy one segment, through a temporary only where it is scaled or a side is no view of its shard."""
    source = Piece(segment.source_offset, segment.source_strides, segment.shape)
    target = Piece(segment.target_offset, segment.target_strides, segment.shape)
    reader, writer = request.sources[segment.source_rank], request.targets[segment.target_rank]
    from_view, to_view = reader.view(source), writer.view(target)
    if from_view is not None and to_view is not None and not segment.is_scaled:
        to_view.copy_(from_view)
        return
    scale = partial(rescaled, source_scale=segment.source_scale, target_scale=segment.target_scale)
    for start in range(0, segment.numel, most_elements):
        for box in lower_run(segment.shape, start, min(start + most_elements, segment.numel)):
            values = torch.empty(box.volume, dtype=request.target_dtype, device=writer.tensor.device)
            reader.read(source.box(box.origin, box.extent), values, scale)
            writer.write(target.box(box.origin, box.extent), values)
