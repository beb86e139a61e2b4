# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Plans against those of the installed DeepSpeed, for the layouts that its planner accepts.

This file is collected only where DeepSpeed is installed. Its modules are loaded by their paths into a package of their
own, because their import names lead to ours.
"""

import importlib.metadata
import importlib.util
import json
import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import affine_strategies
from affine_oracle import check_plan
from deepspeed.checkpoint.affine import (AffinePiece, ParamAffineMap, block_gather_map, contiguous_split_map,
                                         replicated_map, segmented_map, sub_param_map)
from deepspeed.checkpoint.affine_transfer import TransferPlan, TransferSegment, plan_transfer

_PACKAGE = '_deepspeed_checkpoint_of_the_tests'


def _load_theirs():
    package = types.ModuleType(_PACKAGE)
    package.__path__ = []
    sys.modules[_PACKAGE] = package
    modules = []
    for name in ('affine', 'affine_transfer'):
        path = importlib.metadata.distribution('deepspeed').locate_file(f'deepspeed/checkpoint/{name}.py')
        spec = importlib.util.spec_from_file_location(f'{_PACKAGE}.{name}', path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        modules.append(module)
    return modules


their_affine, their_transfer = _load_theirs()
_BUDGET = their_transfer.PlanBudget(max_pair_checks=1 << 30, max_merge_checks=1 << 30)


def _theirs(map_):
    pieces = {
        location: [
            their_affine.AffinePiece(piece.shape, piece.source_offset, piece.source_strides, piece.dest_offset,
                                     piece.dest_strides, piece.locations, piece.scale) for piece in held
        ]
        for location, held in map_.pieces_by_rank.items()
    }
    return their_affine.ParamAffineMap(map_.logical_shape, map_.shard_shapes, pieces)


def _segments(plan):
    """Segments as plain values; strides of axes of one index mean nothing and are left out."""
    return [(segment.source_rank, segment.source_offset, segment.target_rank, segment.target_offset, segment.shape,
             tuple(stride for stride, size in zip(segment.source_strides, segment.shape) if size > 1),
             tuple(stride for stride, size in zip(segment.target_strides, segment.shape) if size > 1))
            for segment in plan.segments]


class _Selector:
    """Chooses the last candidate and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, request):
        self.asked.append((request.target_rank, request.logical_origin, request.shape, request.target_offset,
                           tuple(stride for stride, size in zip(request.target_strides, request.shape) if size > 1),
                           tuple((held.source_rank, held.source_offset,
                                  tuple(stride for stride, size in zip(held.source_strides, request.shape)
                                        if size > 1)) for held in request.candidates)))
        return request.candidates[-1].source_rank


SMALL_CASES = {
    'rows to columns': (contiguous_split_map((4, 6), [2, 2], 0), contiguous_split_map((4, 6), [1, 5], 1)),
    'rows to other rows': (contiguous_split_map((12, 3), [4, 4, 4], 0), contiguous_split_map((12, 3), [6, 6], 0)),
    'columns to whole': (contiguous_split_map((4, 6), [2, 4], 1), replicated_map((4, 6), 2)),
    'whole to columns': (replicated_map((4, 6), 3), contiguous_split_map((4, 6), [2, 4], 1)),
    'an empty shard': (contiguous_split_map((4, 6), [4, 0], 0), contiguous_split_map((4, 6), [0, 6], 1)),
    'fused rows': (sub_param_map((8, 2), [4, 4], [[2, 2], [2, 2]], 0), sub_param_map((8, 2), [4, 4], [[4], [4]], 0)),
    'fused columns': (sub_param_map((3, 8), [4, 4], [[1, 3], [2, 2]], 1), contiguous_split_map((3, 8), [4, 4], 1)),
    'shared keys': (segmented_map((6, 2), [(4, False), (2, True)], 0, 2, [[2, 2]]), replicated_map((6, 2), 1)),
    'gathered blocks': (block_gather_map((8, 3), {
        0: [0, 3],
        1: [2, 1]
    }, 2, 0), contiguous_split_map((8, 3), [3, 5], 0)),
    'three axes': (contiguous_split_map((2, 4, 6), [1, 3], 1), contiguous_split_map((2, 4, 6), [2, 4], 2)),
    'one axis': (contiguous_split_map((7, ), [3, 4], 0), contiguous_split_map((7, ), [1, 5, 1], 0)),
    'a scalar': (replicated_map((), 2), replicated_map((), 3)),
}


@pytest.mark.parametrize('name', SMALL_CASES)
def test_small_cases_have_the_same_segments(name):
    source, target = SMALL_CASES[name]
    mine, theirs = plan_transfer(target, source), their_transfer.plan_transfer(_theirs(target), _theirs(source))
    assert _segments(mine) == _segments(theirs)
    assert mine.moved_elements == theirs.moved_elements
    assert mine.logical_shape == theirs.logical_shape


@pytest.mark.parametrize('name', SMALL_CASES)
def test_small_cases_ask_a_selector_the_same(name):
    source, target = SMALL_CASES[name]
    asked, asked_by_them = _Selector(), _Selector()
    mine = plan_transfer(target, source, replica_selector=asked)
    theirs = their_transfer.plan_transfer(_theirs(target), _theirs(source), replica_selector=asked_by_them)
    assert asked.asked == asked_by_them.asked
    assert _segments(mine) == _segments(theirs)


@st.composite
def _plannable_by_both(draw):
    """Layouts whose pieces step through their shards as the shards' own axes do, which is what 0.19.8 plans."""
    shape = draw(affine_strategies.shapes(min_axes=1))
    kinds = (affine_strategies.replicated, affine_strategies.splits, affine_strategies.sub_params,
             affine_strategies.segmented, affine_strategies.block_gathers, affine_strategies.partially_replicated)
    return tuple(draw(st.one_of([kind(shape) for kind in kinds])) for _ in range(2))


@settings(max_examples=250)
@given(_plannable_by_both())
def test_random_plans_are_as_short_and_ask_the_same(pair):
    source, target = pair
    asked, asked_by_them = _Selector(), _Selector()
    mine = plan_transfer(target.map, source.map, replica_selector=asked)
    theirs = their_transfer.plan_transfer(_theirs(target.map),
                                          _theirs(source.map),
                                          _BUDGET,
                                          replica_selector=asked_by_them)
    check_plan(mine, target.contents, source.contents)
    check_plan(theirs, target.contents, source.contents)
    assert asked.asked == asked_by_them.asked
    assert len(mine.segments) <= len(theirs.segments)


@settings(max_examples=60)
@given(_plannable_by_both())
def test_either_side_reads_the_segments_of_the_other(pair):
    source, target = pair
    mine = plan_transfer(target.map, source.map)
    theirs = their_transfer.plan_transfer(_theirs(target.map), _theirs(source.map), _BUDGET)
    stored = json.loads(json.dumps(theirs.to_dict()))
    check_plan(TransferPlan.from_dict(stored, target.map, source.map), target.contents, source.contents)
    for segment in mine.segments:
        read = their_transfer.TransferSegment.from_dict(json.loads(json.dumps(segment.to_dict())))
        assert TransferSegment.from_dict(read.to_dict()) == segment


def test_a_scaled_segment_fails_in_a_reader_that_knows_no_scale():
    plan = plan_transfer(replicated_map((4, ), 1), replicated_map((4, ), 2, 0.5), scale_power=1)
    with pytest.raises(ValueError):
        their_transfer.TransferSegment.from_dict(json.loads(json.dumps(plan.to_dict()))['segments'][0])


def _one_piece(**changed):
    fields = dict(shape=(4, 3),
                  source_offset=0,
                  source_strides=(3, 1),
                  dest_offset=0,
                  dest_strides=(3, 1),
                  locations={0})
    fields.update(changed)
    shard = fields.pop('shard', (4, 3))
    return ParamAffineMap((4, 3), {0: shard}, {0: [AffinePiece(**fields)]})


REFUSED_BY_BOTH = {
    'a lie about holders': _one_piece(locations={0, 1}),
    'no holders': _one_piece(locations=()),
    'a shard that is not filled': _one_piece(shape=(3, 3)),
    'an uncovered parameter': _one_piece(shape=(3, 3), shard=(3, 3)),
    'a piece outside the parameter': _one_piece(source_offset=3),
    'a piece outside its shard': _one_piece(dest_offset=3),
    'strides of another length': _one_piece(source_strides=(1, )),
    'too many strides': _one_piece(dest_strides=(12, 3, 1)),
    'another factor': _one_piece(scale=0.5),
}


@pytest.mark.parametrize('side', ['source', 'target'])
@pytest.mark.parametrize('name', REFUSED_BY_BOTH)
def test_what_both_refuse_they_refuse_with_the_same_kind_of_error(name, side):
    bad, good = REFUSED_BY_BOTH[name], replicated_map((4, 3), 1)
    maps = (bad, good) if side == 'target' else (good, bad)
    with pytest.raises(ValueError) as theirs:
        their_transfer.plan_transfer(*map(_theirs, maps))
    with pytest.raises(ValueError) as mine:
        plan_transfer(*maps)
    assert [kind.__name__ for kind in (mine.type, theirs.type)] == [theirs.type.__name__] * 2
