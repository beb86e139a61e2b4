# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps looked at element by element.

Some results are per element by nature. Besides, a piece need not be a block of the parameter: a flat run over several
rows, or every third element, is a truthful piece too. Nothing but its elements tells what such a piece covers.
"""

import numpy as np

from deepspeed.checkpoint.affine.blocks import NotABlockError, describe_piece
from deepspeed.checkpoint.affine.checks import listed
from deepspeed.checkpoint.affine.columns import reach
from deepspeed.checkpoint.affine.regions import place_in_set
from deepspeed.checkpoint.affine.validation import (CoverageError, check_coverage, count_unheld, uncovered_error,
                                                    uncovered_flat_offsets)
from deepspeed.checkpoint.affine_geometry.columns import expand_ranges

# The most elements that are ever looked at one by one; a byte each for the parameter, some dozens for the pieces.
_WALK_LIMIT = 2**28


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
    # Summed as floats, which cannot wrap.
    if max(affine_map.numel, columns.volume.astype(np.float64).sum()) > _WALK_LIMIT:
        raise ValueError(
            f'The map of a parameter of shape {affine_map.logical_shape} has pieces that are no blocks of it, which '
            'must be looked at element by element, and it is too large for that: more than 2**28 elements. '
            'flat_partition_map describes flat runs by blocks, whatever their size.')
    held = np.zeros(affine_map.numel, dtype=bool)
    _, address = element_addresses(columns.shape, columns.source_offset, columns.source_strides)
    held[address] = True
    return np.flatnonzero(~held)
