# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Prove two maps of one parameter and join them: where target blocks meet what the source holds."""

from contextlib import contextmanager
from dataclasses import dataclass, fields

import numpy as np

from deepspeed.checkpoint.affine.blocks import Blocks, NotABlockError, parameter_blocks
from deepspeed.checkpoint.affine.columns import PieceColumns
from deepspeed.checkpoint.affine.param_map import as_map
from deepspeed.checkpoint.affine.regions import HeldRegions, covers, count_uncovered, held_regions
from deepspeed.checkpoint.affine.validation import check_addresses, check_shards
from deepspeed.checkpoint.affine_geometry.addresses import AddressLayoutError
from deepspeed.checkpoint.affine_geometry.columns import expand_ranges, row_ids
from deepspeed.checkpoint.affine_geometry.join import PairLimitError, overlapping_pairs
from deepspeed.checkpoint.affine_transfer.budget import PlanBudget
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError, InvalidMapError, UnsupportedLayoutError
from deepspeed.checkpoint.affine_transfer.replicas import gather_reads


@dataclass(frozen=True)
class Side:
    """One map, proved and in normal form: its ``PieceColumns``, ``Blocks`` and ``HeldRegions``.

    ``offers`` is int64[A]: regions with equal numbers have the same holders, each by the same factor.
    """
    columns: PieceColumns
    blocks: Blocks
    regions: HeldRegions
    offers: np.ndarray


@dataclass(frozen=True)
class Meetings:
    """Where target blocks meet source regions: int64[R] each, corners int64[R, N] in the parameter."""
    target: np.ndarray
    region: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    def take(self, rows):
        """The meetings with these numbers."""
        return Meetings(self.target[rows], self.region[rows], self.lower[rows], self.upper[rows])

    @classmethod
    def concatenate(cls, parts):
        """All meetings of several lists."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def part(self, blocks, rows, at):
        """The parts of blocks ``rows`` that lie in the meetings ``at``."""
        return blocks.cut(rows, self.lower[at], self.upper[at])


def compose_maps(target_map, source_map, budget, partial_targets):
    """Prove both maps and join them: ``(source, target, meetings)``."""
    check_pair(target_map, source_map, budget)
    source = prove_source(source_map, budget)
    target = prove_target(target_map, budget, partial_targets)
    return source, target, meet(source, target, budget)


def check_pair(target_map, source_map, budget):
    """Raise unless two maps of one logical shape and a budget are given."""
    as_map(target_map, 'target_map')
    as_map(source_map, 'source_map')
    if not isinstance(budget, PlanBudget):
        raise TypeError(f'limits must be a PlanBudget, but it is a {type(budget).__name__}')
    if source_map.logical_shape != target_map.logical_shape:
        raise InvalidMapError(f'source describes a parameter of shape {source_map.logical_shape} and target one of '
                              f'shape {target_map.logical_shape}')


def prove_source(source_map, budget):
    """Prove a map that is read from: its shards may hold more, but it must describe the whole parameter."""
    with refusals('source'):
        return _normalized(source_map, budget, check_addresses, must_cover=True)


def prove_target(target_map, budget, partial_targets):
    """Prove a map that is written to: its shards must be exact and whole, unless partial targets are allowed."""
    with refusals('target'):
        check = check_addresses if partial_targets else check_shards
        return _normalized(target_map, budget, check, must_cover=not partial_targets)


def reads_of(source, target, meetings, source_ids=None, target_ids=None):
    """The reads that meetings stand for, with all holders as candidates.

    Args:
        source_ids, target_ids: int64, location ids by shard; default: those of the maps that were proved.
    """
    source_ids = source.columns.location_ids if source_ids is None else source_ids
    target_ids = target.columns.location_ids if target_ids is None else target_ids
    return gather_reads(target_ids[target.blocks.shard[meetings.target]], source, meetings.region, source_ids,
                        target.blocks.scale[meetings.target])


def _offers(blocks, regions):
    """Number what regions offer: a holder set, and the factor by which each holder has the region."""
    if not len(blocks.scale) or blocks.scale.min() == blocks.scale.max():
        return regions.holders
    order = np.lexsort(
        (blocks.shard[regions.blocks], np.repeat(np.arange(len(regions.holders)), np.diff(regions.starts))))
    scales = blocks.scale[regions.blocks[order]]
    known = {}
    bounds = zip(regions.starts[:-1].tolist(), regions.starts[1:].tolist())
    return np.array([
        known.setdefault((holders, scales[start:stop].tobytes()), len(known))
        for holders, (start, stop) in zip(regions.holders.tolist(), bounds)
    ], np.int64)


@contextmanager
def refusals(side):
    """Turn what geometry and maps raise into the planner's errors, with the side that it was found on."""
    try:
        yield
    except AffineTransferError as error:
        raise type(error)(f'{side}: {error}') from None
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
    return Side(columns, blocks, regions, _offers(blocks, regions))


def meet(source, target, budget, rows=None, regions=None):
    """Join target blocks with source regions; replicas of a target block are joined once and listed each.

    Args:
        rows, regions: int64, numbers of the target blocks and of the source regions to join. Default: all.
    """
    rows = np.arange(len(target.blocks.shard)) if rows is None else rows
    regions = np.arange(len(source.regions.holders)) if regions is None else regions
    blocks = target.blocks.take(rows)
    lower_regions, upper_regions = source.regions.lower[regions], source.regions.upper[regions]
    ids, first = row_ids(blocks.lower, blocks.extent)
    upper = blocks.upper
    try:
        distinct, region = overlapping_pairs(blocks.lower[first],
                                             upper[first],
                                             lower_regions,
                                             upper_regions,
                                             limit=budget.max_pair_checks)
    except PairLimitError as error:
        raise _too_many_pairs(error.count, budget) from None
    lower = np.maximum(blocks.lower[first[distinct]], lower_regions[region])
    upper = np.minimum(upper[first[distinct]], upper_regions[region])
    if len(first) == len(ids):
        return Meetings(rows[first[distinct]], regions[region], lower, upper)
    order = np.argsort(ids, kind='stable')
    starts = np.searchsorted(ids[order], np.arange(len(first) + 1))
    count = int(np.diff(starts)[distinct].sum())
    if count > budget.max_pair_checks:
        raise _too_many_pairs(count, budget)
    pair, at = expand_ranges(starts[distinct], starts[distinct + 1])
    return Meetings(rows[order[at]], regions[region[pair]], lower[pair], upper[pair])


def _too_many_pairs(count, budget):
    return AffineTransferError(f'{count} pairs of target and source blocks exceed max_pair_checks '
                               f'{budget.max_pair_checks}')
