# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Prove two maps of one parameter and join them: where target blocks meet what the source holds."""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from deepspeed.checkpoint.affine.blocks import Blocks, NotABlockError, WrapsError, parameter_blocks
from deepspeed.checkpoint.affine.columns import PieceColumns
from deepspeed.checkpoint.affine.regions import HeldRegions, covers, count_uncovered, held_regions
from deepspeed.checkpoint.affine.validation import check_addresses, check_shards
from deepspeed.checkpoint.affine_geometry.addresses import AddressLayoutError
from deepspeed.checkpoint.affine_geometry.columns import expand_ranges, row_ids
from deepspeed.checkpoint.affine_geometry.join import PairLimitError, overlapping_pairs
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError, InvalidMapError, UnsupportedLayoutError
from deepspeed.checkpoint.affine_transfer.replicas import gather_reads


@dataclass(frozen=True)
class Side:
    """One map, proved and in normal form: its ``PieceColumns``, ``Blocks`` and ``HeldRegions``."""
    columns: PieceColumns
    blocks: Blocks
    regions: HeldRegions


@dataclass(frozen=True)
class Meetings:
    """Where target blocks meet source regions: int64[R] each, corners int64[R, N] in the parameter."""
    target: np.ndarray
    region: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    def part(self, blocks, rows, at):
        """The parts of blocks ``rows`` that lie in the meetings ``at``."""
        return blocks.cut(rows, self.lower[at], self.upper[at])


def compose_maps(target_map, source_map, budget, partial_targets):
    """Prove both maps and join them: ``(source, target, meetings)``."""
    if tuple(source_map.logical_shape) != tuple(target_map.logical_shape):
        raise InvalidMapError(
            f'source describes a parameter of shape {tuple(source_map.logical_shape)} and target one '
            f'of shape {tuple(target_map.logical_shape)}')
    with _refusals('source'):
        source = _normalized(source_map, budget, check_addresses, must_cover=True)
    with _refusals('target'):
        check = check_addresses if partial_targets else check_shards
        target = _normalized(target_map, budget, check, must_cover=not partial_targets)

    return source, target, _meet(source, target, budget)


def reads_of(source, target, meetings):
    """The reads that meetings stand for, with all holders as candidates."""
    return gather_reads(target.columns.location_ids[target.blocks.shard[meetings.target]], source.regions,
                        meetings.region, source.columns.location_ids, source.blocks,
                        target.blocks.scale[meetings.target])


@contextmanager
def _refusals(side):
    """Turn what geometry and maps raise into the planner's errors, with the side that it was found on."""
    try:
        yield
    except AffineTransferError as error:
        raise type(error)(f'{side}: {error}') from None
    except WrapsError as error:
        # DeepSpeed calls such a piece invalid, too.
        raise InvalidMapError(f'{side}: {error}') from None
    except (NotABlockError, AddressLayoutError) as error:
        raise UnsupportedLayoutError(f'{side}: {error}') from None
    except PairLimitError as error:
        raise AffineTransferError(f'{side}: pieces meet each other {error.count} times, more than the {error.limit} '
                                  'comparisons that a proof may take; the layout is too tangled') from None
    except ValueError as error:
        raise InvalidMapError(f'{side}: {error}') from None


def _normalized(affine_map, budget, check, must_cover):
    """Prove one map and bring it into normal form."""
    shape = affine_map.logical_shape
    if len(shape) > budget.max_ndim:
        raise UnsupportedLayoutError(f'{len(shape)} axes exceed max_ndim {budget.max_ndim}')
    columns = affine_map.columns
    if columns.piece_count > budget.max_pieces_per_map:
        raise AffineTransferError(f'{columns.piece_count} pieces exceed max_pieces_per_map '
                                  f'{budget.max_pieces_per_map}')
    blocks = parameter_blocks(columns, shape)
    check(columns)
    regions = held_regions(columns, blocks, shape)
    if must_cover and not covers(regions, shape):
        count, offset = count_uncovered(regions, shape)
        raise InvalidMapError(f'pieces cover {affine_map.numel - count} of its {affine_map.numel} logical elements; '
                              f'the first that no location holds is at offset {offset}')
    return Side(columns, blocks, regions)


def _meet(source, target, budget):
    """Join target blocks with source regions; replicas of a target block are joined once and listed each."""
    blocks, regions = target.blocks, source.regions
    ids, first = row_ids(blocks.lower, blocks.extent)
    upper = blocks.upper
    try:
        distinct, region = overlapping_pairs(blocks.lower[first],
                                             upper[first],
                                             regions.lower,
                                             regions.upper,
                                             limit=budget.max_pair_checks)
    except PairLimitError as error:
        raise AffineTransferError(f'{error.count} pairs of target and source blocks exceed max_pair_checks '
                                  f'{budget.max_pair_checks}') from None
    lower = np.maximum(blocks.lower[first[distinct]], regions.lower[region])
    upper = np.minimum(upper[first[distinct]], regions.upper[region])
    if len(first) == len(ids):
        return Meetings(first[distinct], region, lower, upper)
    order = np.argsort(ids, kind='stable')
    starts = np.searchsorted(ids[order], np.arange(len(first) + 1))
    count = int(np.diff(starts)[distinct].sum())
    if count > budget.max_pair_checks:
        raise AffineTransferError(f'{count} pairs of target and source blocks exceed max_pair_checks '
                                  f'{budget.max_pair_checks}')
    pair, at = expand_ranges(starts[distinct], starts[distinct + 1])
    return Meetings(order[at], region[pair], lower[pair], upper[pair])
