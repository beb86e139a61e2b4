# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""From meetings and chosen holders to the segments of a plan."""

import numpy as np

from deepspeed.checkpoint.affine_geometry.columns import row_ids
from deepspeed.checkpoint.affine_geometry.merge import BlockPairs, MergeLimitError, merge_blocks
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError
from deepspeed.checkpoint.affine_transfer.segments import SegmentColumns


def segment_columns(source, target, meetings, chosen, ndim, budget, source_ids=None, target_ids=None):
    """Make the copies, join those that continue each other, and put them in the order of their targets.

    Args:
        chosen: int64[R], the source block that each meeting is read from.
        ndim: number of axes of the parameter.
        source_ids, target_ids: int64, location ids by shard; default: those of the maps that were proved.

    Raises:
        AffineTransferError: a budget that is exhausted; the message names it.
    """
    source_ids = source.columns.location_ids if source_ids is None else source_ids
    target_ids = target.columns.location_ids if target_ids is None else target_ids
    at = np.arange(len(chosen))
    read, written = meetings.part(source.blocks, chosen, at), meetings.part(target.blocks, meetings.target, at)
    rescaled = read.scale != written.scale
    source_scale, target_scale = np.where(rescaled, read.scale, 1.0), np.where(rescaled, written.scale, 1.0)
    kind, _ = row_ids(read.shard, written.shard, source_scale.view(np.int64), target_scale.view(np.int64))
    pairs = BlockPairs(kind, read.extent, read.offset, read.strides, written.offset, written.strides, at)
    try:
        merged = merge_blocks(pairs, budget.max_merge_passes, budget.max_merge_checks)
    except MergeLimitError as error:
        raise AffineTransferError(f'{error.checks} comparisons of segments exceed max_merge_checks '
                                  f'{budget.max_merge_checks}') from None
    target_rank = target_ids[written.shard[merged.row]]
    order = np.lexsort((merged.second, target_rank))
    merged = merged.take(order)
    columns = SegmentColumns(source_rank=source_ids[read.shard[merged.row]],
                             source_offset=merged.first,
                             source_strides=merged.first_strides[:, :ndim],
                             target_rank=target_rank[order],
                             target_offset=merged.second,
                             target_strides=merged.second_strides[:, :ndim],
                             shape=merged.extent[:, :ndim],
                             source_scale=source_scale[merged.row],
                             target_scale=target_scale[merged.row])
    if len(columns) > budget.max_segments:
        raise AffineTransferError(f'{len(columns)} segments exceed max_segments {budget.max_segments}')
    if columns.nbytes > budget.max_plan_bytes:
        raise AffineTransferError(f'{columns.nbytes} bytes of segments exceed max_plan_bytes {budget.max_plan_bytes}')
    return columns


def shard_numels(columns):
    """Elements of every shard of ``PieceColumns`` by its location."""
    return dict(zip(columns.shard_ids.tolist(), columns.shard_numel.tolist()))
