# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Source and target buffers that share memory: refused, but for regions that stay where they are."""

from typing import List, Sequence, Tuple

import numpy as np

from deepspeed.checkpoint.affine_transfer_executor.buffers import Piece, Shard
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError
from deepspeed.checkpoint.affine_transfer_executor.overlap import Region, clashes, first_clash

REMEDY = 'Give one of them memory of its own (clone it)'


def check_memory(requests: Sequence, rank: int) -> None:
    """Refuse a batch on this process where a write could change what is still to be read, or written twice.

    Args:
        requests: PreparedRequests.
        rank: this process.

    Raises:
        AffineTransferExecutionError: memory is shared, or cannot be shown not to be.
    """
    sources = _used_buffers(requests, rank, 'source')
    targets = _used_buffers(requests, rank, 'target')
    target_regions = [Region.of(shard.tensor) for _, _, shard in targets]
    for (index, location, _), region in zip(targets, target_regions):
        if region.meets_itself():
            raise AffineTransferExecutionError(f'{requests[index].name}: elements of target location {location} share '
                                               f'memory with one another, as in an expanded tensor. {REMEDY}')
    clash = first_clash(target_regions)
    if clash is not None:
        _refuse(requests, *(('target', ) + targets[index][:2] for index in clash))
    source_regions = [Region.of(shard.tensor) for _, _, shard in sources]
    for one, other in clashes(source_regions, target_regions):
        _check_segments(requests, sources[one], targets[other], rank)


def _used_buffers(requests: Sequence, rank: int, side: str) -> List[Tuple[int, int, Shard]]:
    """Request, location and shard of the buffers that segments read or write on this process."""
    used = []
    for index, request in enumerate(requests):
        mine = getattr(request, f'{side}_process') == rank
        shards = getattr(request, f'{side}s')
        for location in np.unique(getattr(request.columns, f'{side}_rank')[mine]).tolist():
            used.append((index, location, shards[location]))
    return used


def _check_segments(requests: Sequence, source: Tuple[int, int, Shard], target: Tuple[int, int, Shard],
                    rank: int) -> None:
    """Two buffers share memory: no segment may read there what another writes."""
    reads = _moving_regions(requests, source[0], source[1], rank, 'source')
    writes = _moving_regions(requests, target[0], target[1], rank, 'target')
    for _ in clashes(reads, writes):
        _refuse(requests, ('source', ) + source[:2], ('target', ) + target[:2])


def _moving_regions(requests: Sequence, index: int, location: int, rank: int, side: str) -> List[Region]:
    """The memory of a buffer which segments read or write, without those that stay where they are."""
    request = requests[index]
    mine = (getattr(request, f'{side}_process') == rank) & (getattr(request.columns, f'{side}_rank') == location)
    shard: Shard = getattr(request, f'{side}s')[location]
    regions = []
    for position in np.flatnonzero(mine).tolist():
        segment = request.columns.segment(position)
        if request.source_process[position] == request.target_process[position] and stays(request, segment):
            continue
        piece = Piece(getattr(segment, f'{side}_offset'), getattr(segment, f'{side}_strides'), segment.shape)
        blocks = shard.blocks(piece)
        regions += [Region.of(block) for block in ([shard.tensor] if blocks is None else blocks)]
    return regions


def stays(request, segment) -> bool:
    """Whether a local segment copies a region onto itself, bit for bit."""
    if segment.is_scaled:
        return False
    return same_memory(request.sources[segment.source_rank],
                       Piece(segment.source_offset, segment.source_strides, segment.shape),
                       request.targets[segment.target_rank],
                       Piece(segment.target_offset, segment.target_strides, segment.shape))


def same_memory(one: Shard, its_piece: Piece, other: Shard, others_piece: Piece) -> bool:
    """Whether two pieces of one shape are the same bytes in the same order, of one dtype."""
    if one.tensor.dtype != other.tensor.dtype:
        return False
    views = one.view(its_piece), other.view(others_piece)
    return all(view is not None for view in views) and _same(*views)


def _same(one, other) -> bool:
    strides = [[stride for size, stride in zip(view.shape, view.stride()) if size > 1] for view in (one, other)]
    return one.device == other.device and one.data_ptr() == other.data_ptr() and strides[0] == strides[1]


def _refuse(requests: Sequence, one: Tuple[str, int, int], other: Tuple[str, int, int]) -> None:
    names = [f'{side} location {location} of {requests[index].name}' for side, index, location in (one, other)]
    raise AffineTransferExecutionError(f'{names[0]} and {names[1]} overlap in memory, or cannot be shown not to. Only '
                                       f'a segment that copies a region onto itself may. {REMEDY}')
