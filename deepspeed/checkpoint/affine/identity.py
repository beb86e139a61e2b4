# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""When two maps are the same map, whatever order their columns keep shards and sets of holders in."""

from hashlib import blake2b

import numpy as np


def geometry_digest(logical_shape, columns):
    """Return 16 bytes that are equal for maps of equal geometry.

    What counts: the parameter's shape, which locations have a shard of which shape, and each shard's pieces in their
    order with all their fields. What does not: the order of shards, the numbering of sets of holders, padding.
    """
    count = columns.shard_count
    shard_order = np.argsort(columns.shard_ids)
    position = np.empty(count, dtype=np.int64)
    position[shard_order] = np.arange(count)
    piece_position = position[columns.shard]
    piece_order = np.argsort(piece_position, kind='stable')
    holders, set_sizes, set_ids = _canonical_sets(columns, columns.holders[piece_order])

    shard_axes = int(columns.shard_ndim.max(initial=0))
    axes = int(columns.ndim.max(initial=0))
    digest = blake2b(repr(tuple(logical_shape)).encode(), digest_size=16)
    for array in (columns.shard_ids[shard_order], columns.shard_ndim[shard_order],
                  columns.shard_shape[shard_order, :shard_axes], piece_position[piece_order],
                  columns.ndim[piece_order], columns.shape[piece_order, :axes], columns.source_offset[piece_order],
                  columns.source_strides[piece_order, :axes], columns.dest_offset[piece_order],
                  columns.dest_strides[piece_order, :axes], holders, set_sizes, set_ids, columns.scale[piece_order]):
        # The length separates the arrays, so that no two different lists of arrays give the same bytes.
        digest.update(repr(array.shape).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def _canonical_sets(columns, holders):
    """Renumber the sets of holders by first use: index per piece, size per set, ascending ids of all sets."""
    used, first, inverse = np.unique(holders, return_index=True, return_inverse=True)
    by_first_use = np.argsort(first)
    number = np.empty(len(used), dtype=np.int64)
    number[by_first_use] = np.arange(len(used))

    number_of_set = np.full(len(columns.set_starts) - 1, -1, dtype=np.int64)
    number_of_set[used] = number
    sizes = np.diff(columns.set_starts)
    set_of_member = np.repeat(number_of_set, sizes)
    ids = columns.location_ids[columns.set_members]
    kept = set_of_member >= 0
    order = np.lexsort((ids[kept], set_of_member[kept]))
    return number[inverse.reshape(-1)], sizes[used][by_first_use], ids[kept][order]
