# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps looked at element by element.

Some results are per element by nature. Besides, a piece need not be a block of the parameter: a flat run over several
rows, or every third element, is a truthful piece too. Nothing but its elements tells what such a piece covers.
"""

import numpy as np
from numpy.lib.stride_tricks import as_strided

from deepspeed.checkpoint.affine.blocks import NotABlockError, describe_piece
from deepspeed.checkpoint.affine.checks import WALK_LIMIT, listed
from deepspeed.checkpoint.affine.columns import reach
from deepspeed.checkpoint.affine.regions import place_in_set
from deepspeed.checkpoint.affine.validation import (CoverageError, check_coverage, check_shards, count_unheld,
                                                    uncovered_error, uncovered_flat_offsets)
from deepspeed.checkpoint.affine_geometry.addresses import AddressLayoutError
from deepspeed.checkpoint.affine_geometry.columns import expand_ranges

# The most shard addresses that are marked one by one. Reading a stored map does it, whose sizes nobody vouches for.
_MARK_LIMIT = 2**24


def element_addresses(shape, offset, strides):
    """Return ``(piece, address)``, int64[E] each: the address of every element of every piece.

    Pieces come in their order, the elements of a piece in its row-major order. E is the sum of the pieces' volumes, so
    this is for reports about small parameters, not for planning.

    Args:
        shape, strides: int64[P, K] of P pieces. offset: int64[P].
    """
    volume = shape.prod(axis=1)
    piece, rest = expand_ranges(np.zeros_like(volume), volume)
    address = offset[piece]
    for axis in range(shape.shape[1] - 1, -1, -1):
        rest, index = np.divmod(rest, shape[piece, axis])
        address += index * strides[piece, axis]
    return piece, address


def first_revisit(shape, offset, strides):
    """Return ``(piece, address)`` of a piece that has one address more than once, or None where there is none.

    Strides of which each steps over everything that the smaller ones reach cannot meet an address twice. Only pieces
    with other strides are looked at element by element.
    """
    size = np.where(shape > 1, shape, 1)
    step = np.where(shape > 1, np.abs(strides), 0)
    order = np.argsort(step, axis=1, kind='stable')
    size, step = np.take_along_axis(size, order, axis=1), np.take_along_axis(step, order, axis=1)
    length = (size - 1) * step
    inside = np.cumsum(length, axis=1) - length
    unclear = np.flatnonzero(((size > 1) & (step <= inside)).any(axis=1) & (shape > 0).all(axis=1))
    piece, address = element_addresses(shape[unclear], offset[unclear], strides[unclear])
    order = np.lexsort((address, piece))
    piece, address = piece[order], address[order]
    again = np.flatnonzero((piece[1:] == piece[:-1]) & (address[1:] == address[:-1]))
    return (int(unclear[piece[again[0]]]), int(address[again[0]])) if len(again) else None


def uncovered_elements(affine_map):
    """Return the addresses of the parameter that no shard holds, int64, ascending.

    By geometry where all pieces are blocks of the parameter, element by element where they are not.

    Raises:
        ValueError: a piece that leaves the parameter or its shard, a map that is too large for the walk.
    """
    try:
        return uncovered_flat_offsets(affine_map)
    except NotABlockError:
        return _walk_uncovered(affine_map)


def count_uncovered_elements(affine_map):
    """How many of those addresses there are, and the lowest: ``(count, address)``, or ``(0, None)``."""
    try:
        return count_unheld(affine_map)
    except NotABlockError:
        missing = _walk_uncovered(affine_map)
        return len(missing), int(missing[0]) if len(missing) else None


def check_whole_map(affine_map):
    """Raise unless shards are exact, hold the whole parameter, and every piece names its true holders.

    By geometry where all pieces are blocks of the parameter, element by element where they are not.

    Raises: as ``ParamAffineMap.validate_coverage``.
    """
    affine_map.validate()
    try:
        check_coverage(affine_map)
    except NotABlockError:
        _check_elements(affine_map)


def element_holders(columns):
    """Return a dict from each held address of the flat parameter to the set of locations whose shards hold it.

    Raises:
        ValueError: pieces of more than 2**28 elements.
    """
    if _total(columns.volume) > WALK_LIMIT:
        raise ValueError('The pieces of the map have more than 2**28 elements, too many to list the holders of each. '
                         'The locations of pieces_by_rank, or holders of columns, say the same piece by piece.')
    piece, offset = element_addresses(columns.shape, columns.source_offset, columns.source_strides)
    ranks = columns.location_ids[columns.shard[piece]]
    order = np.argsort(offset, kind='stable')
    held, starts = np.unique(offset[order], return_index=True)
    return {int(address): set(group.tolist()) for address, group in zip(held, np.split(ranks[order], starts[1:]))}


def check_exact_shards(columns):
    """Raise unless the pieces of every shard fill its addresses once and only once.

    By geometry where strides allow it, address by address where they interleave.

    Raises: as ``check_shards``; ``AddressLayoutError`` only of shards too large to mark their addresses.
    """
    try:
        check_shards(columns)
    except AddressLayoutError:
        # Of the volumes and not the shards: those were summed as integers, and a hostile sum may have wrapped.
        if _total(columns.volume) > _MARK_LIMIT:
            raise
        _check_marks(columns)


def _check_marks(columns):
    """Raise unless every shard address is used, by pieces that lie inside and have as many elements as their shard.

    With as many elements as addresses, none is used twice exactly if each is used.
    """
    first = np.cumsum(columns.shard_numel) - columns.shard_numel
    used = np.zeros(int(columns.shard_numel.sum()), dtype=bool)
    begins = (first[columns.shard] + columns.dest_offset).tolist()
    for begin, (shape, _, _, _, strides, _, _) in zip(begins, columns.rows()):
        if 0 not in shape:
            as_strided(used[begin:], shape, strides)[...] = True
    if not used.all():
        address = int(np.argmin(used))
        shard = int(np.searchsorted(first, address, 'right')) - 1
        raise ValueError(f'Rank {columns.location_ids[shard]} has no piece at shard address {address - first[shard]}, '
                         'so its pieces use another address twice and elements would be lost.')


def _total(counts):
    """Sum of a column as a float, which cannot wrap."""
    return counts.astype(np.float64).sum()


def check_source(affine_map):
    """Raise unless all pieces lie inside the parameter, in whose storage other data may follow.

    Raises:
        ValueError: a piece outside, or a stride below zero, which no tensor has.
    """
    columns = affine_map.columns
    backward = (columns.volume > 0) & ((columns.source_strides < 0) & (columns.shape > 1)).any(axis=1)
    if backward.any():
        piece = int(np.argmax(backward))
        raise ValueError(f'{describe_piece(columns, piece)} has a negative source stride, which no tensor can have.')
    low, high = reach(columns.source_offset, columns.shape, columns.source_strides)
    outside = (columns.volume > 0) & ((low < 0) | (high >= affine_map.numel))
    if outside.any():
        piece = int(np.argmax(outside))
        raise ValueError(f'Rank {columns.rank(piece)} has a piece at flat offsets {low[piece]} to {high[piece]}, '
                         f'outside the parameter of {affine_map.numel} elements.')


def _check_elements(affine_map):
    columns = affine_map.columns
    uncovered = _walk_uncovered(affine_map)
    if len(uncovered):
        raise uncovered_error(len(uncovered), affine_map.logical_shape, uncovered[0])
    piece, address = element_addresses(columns.shape, columns.source_offset, columns.source_strides)
    order = np.lexsort((columns.shard[piece], address))
    piece, address = piece[order], address[order]
    # An address is right if all pieces there name one set, lie in shards of it, and as many as it has members.
    opens = np.diff(address, prepend=-1) != 0
    first, group = np.flatnonzero(opens), np.cumsum(opens) - 1
    shards = np.add.reduceat(opens | (np.diff(columns.shard[piece], prepend=-1) != 0), first, dtype=np.int64)
    named = columns.holders[piece]
    wrong = (place_in_set(columns, columns) < 0)[piece] | (named != named[first][group])
    wrong |= np.diff(columns.set_starts)[named] != shards[group]
    if wrong.any():
        offset = int(address[np.argmax(wrong)])
        raise _false_claim(columns, piece[address == offset].tolist(), offset)


def _false_claim(columns, pieces, offset):
    """The ``CoverageError`` for one of the pieces that have an offset, the first that does not name its holders."""
    true = sorted({columns.rank(piece) for piece in pieces})
    claims = ((piece, sorted(columns.holder_ids(columns.holders[piece]))) for piece in pieces)
    piece, claimed = next((piece, claimed) for piece, claimed in claims if claimed != true)
    return CoverageError(f'{describe_piece(columns, piece)} claims {listed(claimed)} for flat offset {offset}, whose '
                         f'true holders are {listed(true)}. A piece must name exactly the locations that hold it, all '
                         'of its elements alike.')


def _walk_uncovered(affine_map):
    """Addresses of the parameter that no piece has, int64, ascending, found element by element.

    Raises:
        ValueError: a piece that leaves the parameter, a map that is too large for this.
    """
    check_source(affine_map)
    columns = affine_map.columns
    if max(affine_map.numel, _total(columns.volume)) > WALK_LIMIT:
        raise ValueError(
            f'The map of a parameter of shape {affine_map.logical_shape} has pieces that are no blocks of it, which '
            'must be looked at element by element, and it is too large for that: more than 2**28 elements. '
            'flat_partition_map describes flat runs by blocks, whatever their size.')
    held = np.zeros(affine_map.numel, dtype=bool)
    _, address = element_addresses(columns.shape, columns.source_offset, columns.source_strides)
    held[address] = True
    return np.flatnonzero(~held)
