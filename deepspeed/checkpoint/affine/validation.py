# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Is a map true? Exact shards, coverage and homogeneity, decided by geometry and never by walking elements."""

import numpy as np

from deepspeed.checkpoint.affine.blocks import (HoldersError, box_shape, check_dest, describe_piece, parameter_blocks,
                                                placed_blocks)
from deepspeed.checkpoint.affine.checks import WALK_LIMIT
from deepspeed.checkpoint.affine.regions import covers, count_uncovered, held_regions, uncovered_boxes
from deepspeed.checkpoint.affine_geometry.addresses import (AddressCollisionError, AddressLayoutError,
                                                            check_addresses_apart)
from deepspeed.checkpoint.affine_geometry.columns import expand_ranges
from deepspeed.checkpoint.affine_geometry.join import PairLimitError
from deepspeed.checkpoint.affine_geometry.strides import row_major_strides

# How many more meetings than blocks the boxes of shard addresses may have before they count as tangled.
_TANGLE_LIMIT = 1 << 20


class CoverageError(AssertionError, ValueError):
    """A map that leaves elements of its parameter unheld, or lies about who holds them.

    Both an ``AssertionError``, which is what DeepSpeed raises here, and a ``ValueError``, which is what
    callers of the other checks catch.
    """


def check_shards(columns):
    """Raise unless the pieces of every shard fill its addresses once and only once.

    Raises:
        AddressLayoutError: addresses whose strides do not divide each other; nothing is proved about them.
        ValueError: too few or too many elements, an address outside the shard or used twice.
    """
    held = np.zeros(columns.shard_count, np.int64)
    np.add.at(held, columns.shard, columns.volume)
    wrong = np.flatnonzero(held != columns.shard_numel)
    if len(wrong):
        shard = int(wrong[0])
        raise ValueError(f'Rank {columns.location_ids[shard]} holds a shard of {columns.shard_numel[shard]} elements, '
                         f'but its pieces account for {held[shard]} of its elements.')
    try:
        check_addresses(columns)
    except PairLimitError:
        # Pieces of the right total that do not tile their shards must collide; only which ones do is left open.
        raise ValueError('Many pieces use the same shard addresses twice, so elements would be lost.') from None


def check_addresses(columns):
    """Raise unless every piece lies inside its shard and no address is used twice; shards may hold more.

    Raises: as ``check_shards``, and
        PairLimitError: shards with free addresses whose pieces are too tangled to tell them apart.
    """
    check_dest(columns)
    rows = np.flatnonzero((columns.shape > 0).all(axis=1))
    try:
        check_addresses_apart(columns.shard[rows], columns.dest_offset[rows], columns.shape[rows],
                              columns.dest_strides[rows], _TANGLE_LIMIT + len(rows))
    except AddressCollisionError as error:
        one, other = (describe_piece(columns, int(rows[block])) for block in error.blocks)
        raise ValueError(f'{one} and {other} use the same shard addresses twice, so one of the two would be '
                         'lost.') from None
    except AddressLayoutError as error:
        raise AddressLayoutError(error.block, f'{describe_piece(columns, int(rows[error.block]))}: {error}.') from None


def check_coverage(affine_map):
    """Raise unless every element is held and every piece names exactly its holders.

    Raises:
        NotABlockError: a piece that is no block of the parameter.
        ValueError: a piece that leaves the parameter.
        CoverageError: elements that no shard holds, or holders that are not the ones named.
    """
    columns = affine_map.columns
    try:
        blocks = parameter_blocks(columns, affine_map.logical_shape)
        regions = held_regions(columns, blocks, affine_map.logical_shape)
    except (HoldersError, PairLimitError) as error:
        raise CoverageError(str(error)) from None
    check_covered(regions, affine_map.logical_shape)


def check_covered(regions, logical_shape):
    """Raise ``CoverageError`` unless disjoint regions hold the whole parameter."""
    if not covers(regions, logical_shape):
        count, offset = count_uncovered(regions, logical_shape)
        raise uncovered_error(count, logical_shape, offset)


def uncovered_error(count, logical_shape, first):
    """The ``CoverageError`` for elements that no shard holds; ``first`` is the flat offset of the first of them."""
    return CoverageError(f'{count} elements of a parameter of shape {tuple(logical_shape)} have no holder, the first '
                         f'of them flat offset {first}.')


def count_unheld(affine_map):
    """How many elements no shard holds, and the lowest flat offset among them: ``(count, offset)`` or ``(0, None)``.

    Raises: as ``uncovered_flat_offsets``.
    """
    return count_uncovered(placed_blocks(affine_map.columns, affine_map.logical_shape), affine_map.logical_shape)


def uncovered_flat_offsets(affine_map):
    """Flat offsets, ascending int64, of the elements that no shard holds.

    Raises:
        NotABlockError: a piece that is no block of the parameter.
        ValueError: a piece that leaves the parameter or its shard, more than 2**28 offsets.
    """
    shape = affine_map.logical_shape
    blocks = placed_blocks(affine_map.columns, shape)
    lower, upper = uncovered_boxes(blocks.lower, blocks.upper, shape)
    if (upper - lower).astype(np.float64).prod(axis=1).sum() > WALK_LIMIT:
        raise ValueError(f'No shard holds more than 2**28 elements of the parameter of shape {tuple(shape)}, too many '
                         'to list each. validate_coverage says how many and which is the first.')
    strides = row_major_strides(box_shape(shape))
    owner, offsets = np.arange(len(lower)), lower @ np.array(strides, np.int64)
    for axis, stride in enumerate(strides):
        repeat, step = expand_ranges(np.zeros(len(owner), np.int64), (upper - lower)[owner, axis])
        owner, offsets = owner[repeat], offsets[repeat] + step * stride
    return np.sort(offsets)
