# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The values that planner and executor share: segments, plans and their stored form, endpoints, budgets."""

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.affine import contiguous_split_map, relabel, replicated_map
from deepspeed.checkpoint.affine_transfer import (AffineTransferError, InvalidMapError, PlanBudget, PlanStatistics,
                                                  SegmentColumns, TransferEndpoints, TransferPlan, TransferSegment,
                                                  plan_transfer)

PLAIN = TransferSegment(0, 0, (8, 1), 1, 4, (4, 1), (2, 4))
SCALED = TransferSegment(0, 4, (8, 1), 2, 0, (4, 1), (2, 4), 2.0, 0.5)


def example_plan():
    return TransferPlan.from_columns(SegmentColumns.from_segments([PLAIN, SCALED]), (2, 8), {0: 16}, {1: 12, 2: 8})


def test_segments_of_columns_equal_and_hash_as_the_objects_do():
    segments = example_plan().segments
    assert segments == (PLAIN, SCALED) and segments == [PLAIN, SCALED] and (PLAIN, SCALED) == segments
    assert segments != (PLAIN, ) and segments != (SCALED, PLAIN) and segments != 'segments'
    assert hash(segments) == hash((PLAIN, SCALED))
    assert segments[-1] == SCALED and segments[1:] == (SCALED, ) and list(segments) == [PLAIN, SCALED]
    assert len(segments) == 2 and SCALED in segments and segments.index(SCALED) == 1
    with pytest.raises(IndexError):
        segments[2]


def test_a_plan_of_objects_and_a_plan_of_columns_are_one_plan():
    plan = example_plan()
    other = TransferPlan((PLAIN, SCALED), (2, 8), 16, PlanStatistics(1, 1, 1, 1, 1, 1), {0: 16}, {1: 12, 2: 8})
    assert other == plan and hash(other) == hash(plan) and plan.moved_elements == 16
    assert other.columns.source_last.tolist() == [11, 15] and other.columns.numel.tolist() == [8, 8]
    assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan)
    counted = TransferPlan((PLAIN, SCALED), (2, 8), 0, plan.statistics, {0: 16}, {1: 12, 2: 8})
    assert counted == plan and hash(counted) == hash(plan)
    mixed = TransferPlan((PLAIN, TransferSegment(0, 0, (1, ), 1, 0, (1, ), (4, ))), (2, 8), 12, plan.statistics)
    with pytest.raises(AffineTransferError, match='segment 1: shape has 1 axes; expected 2'):
        mixed.columns


def test_values_cannot_be_changed():
    plan = example_plan()
    with pytest.raises(ValueError):
        plan.columns.shape[0, 0] = 5
    with pytest.raises(TypeError):
        plan.source_numel[0] = 5
    with pytest.raises(AttributeError):
        plan.logical_shape = ()
    owners = {0: 0}
    endpoints = TransferEndpoints(owners, {0: 1})
    owners[0] = 7
    assert endpoints.source == {0: 0} and pickle.loads(pickle.dumps(endpoints)) == endpoints
    assert len({endpoints, TransferEndpoints({0: 0}, {0: 1})}) == 1


def test_the_stored_form_is_that_of_deepspeed_and_refuses_its_reader_where_segments_are_scaled():
    stored = example_plan().to_dict()
    assert stored['logical_shape'] == [2, 8]
    plain, scaled = stored['segments']
    assert plain == {'shape': [2, 4], 'source': [0, 0, [8, 1]], 'target': [1, 4, [4, 1]]}
    assert scaled == {'shape': [2, 4], 'source': [0, 4, [8, 1], 2.0], 'target': [2, 0, [4, 1], 0.5]}
    assert TransferPlan.from_dict(json.loads(json.dumps(stored))) == example_plan()
    # DeepSpeed 0.19.8 unpacks three items.
    with pytest.raises(ValueError):
        rank, offset, strides = scaled['source']


def test_a_plan_without_buffer_sizes_is_read():
    stored = {'logical_shape': [2, 8], 'segments': [PLAIN.to_dict()]}
    plan = TransferPlan.from_dict(stored)
    assert plan.segments == (PLAIN, ) and plan.source_numel == {} and plan.target_numel == {}
    assert plan.moved_elements == 8 and plan.statistics.segments == 1
    empty = TransferPlan.from_dict({'logical_shape': [0, 3], 'segments': []})
    assert len(empty.segments) == 0 and empty.columns.ndim == 2


def changed(path, value):
    """The stored example with one entry replaced, or removed where the value is ``KeyError``."""
    stored = example_plan().to_dict()
    where = stored
    for key in path[:-1]:
        where = where[key]
    if value is KeyError:
        del where[path[-1]]
    else:
        where[path[-1]] = value
    return stored


@pytest.mark.parametrize('stored, match', [
    (None, 'plan is a NoneType; expected a dict'),
    (changed(['segments'], KeyError), "plan has no 'segments'"),
    (changed(['version'], 2), "plan has the unknown key 'version'"),
    (changed(['logical_shape'], 8), 'plan logical_shape is 8; expected a list'),
    (changed(['logical_shape', 0], -1), r'plan logical_shape\[0\] is -1'),
    (changed(['logical_shape', 0], 2.0), r'plan logical_shape\[0\] is 2.0; expected an integer'),
    (changed(['logical_shape', 0], True), r'plan logical_shape\[0\] is True; expected an integer'),
    (changed(['logical_shape', 0], 10**500), r'plan logical_shape\[0\] is an integer of 1661 bits'),
    (changed(['logical_shape'], [2**32, 2**32]), 'more elements than int64'),
    (changed(['logical_shape'], [1] * 9), '9 axes, more than max_ndim 8'),
    (changed(['segments', 1], 5), 'plan segment 1 is a int; expected a dict'),
    (changed(['segments', 1, 'scale'], 5), "plan segment 1 has the unknown key 'scale'"),
    (changed(['segments', 1, 'source'], KeyError), "plan segment 1 has no 'source'"),
    (changed(['segments', 0, 'source'], [0, 0]), 'plan segment 0 source has 2 items'),
    (changed(['segments', 0, 'source', 0], 'a'), "plan segment 0 source location is 'a'"),
    (changed(['segments', 0, 'source', 1], -1), 'plan segment 0 source offset is -1'),
    (changed(['segments', 0, 'source', 2], [8]), 'plan segment 0 source has 1 strides for 2 axes'),
    (changed(['segments', 0, 'source', 2, 0], -8), r'plan segment 0 source strides\[0\] is -8'),
    (changed(['segments', 0, 'source', 2, 0], 2**62), 'source ends at element 4611686018427387907'),
    (changed(['segments', 0, 'source', 2, 0], 2**62 + 1), r'strides\[0\] is 4611686018427387905; expected 0 to 46'),
    (changed(['segments', 0, 'shape', 0], 0), r'plan segment 0 shape\[0\] is 0'),
    (changed(['segments', 0, 'shape'], [1] * 100), 'plan segment 0 has 100 axes'),
    (changed(['segments', 0, 'source'], [0, 0, [8, 1], 2.0]), 'one end has a scale'),
    (changed(['segments', 1, 'source', 3], float('nan')), 'source scale is nan, which is not invertible'),
    (changed(['segments', 1, 'source', 3], float('inf')), 'source scale is inf'),
    (changed(['segments', 1, 'source', 3], 10**400), 'source scale is an integer of 1329 bits'),
    (changed(['segments', 1, 'target', 3], 0), 'target scale is 0, which is not invertible'),
    (changed(['segments', 0, 'source', 0], 4), 'plan segment 0 source location 4 is not in source_numel'),
    (changed(['target_numel', 0, 1], 11), 'plan segment 0 target ends at element 11 of location 1, which has 11'),
    (changed(['target_numel', 1, 0], 1), r'target_numel\[1\] names location 1 a second time'),
    (changed(['target_numel', 1], [1]), r'target_numel\[1\] has 1 items'),
])
def test_a_stored_plan_is_not_trusted(stored, match):
    with pytest.raises(AffineTransferError, match=match):
        TransferPlan.from_dict(stored)


def test_the_limits_bound_what_is_read():
    with pytest.raises(AffineTransferError, match='2 segments, more than max_segments 1'):
        TransferPlan.from_dict(example_plan().to_dict(), limits=PlanBudget(max_segments=1))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(['shape', 'source', 'target', 'segments', 'logical_shape', 'source_numel']), inner),
    max_leaves=12)


@given(JUNK, st.lists(st.integers(0, 8), max_size=4))
def test_anything_at_all_is_a_plan_or_an_error_of_ours(junk, path):
    stored = example_plan().to_dict()
    where = stored
    for step in path[:-1]:
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        inner = where[keys[step % len(keys)]]
        if not isinstance(inner, (dict, list)):
            break
        where = inner
    keys = list(where) if isinstance(where, dict) else list(range(len(where)))
    where[keys[path[-1] % len(keys)] if path else keys[0]] = junk
    for candidate in (stored, junk):
        try:
            assert TransferPlan.from_dict(candidate).moved_elements >= 0
        except AffineTransferError as error:
            assert len(str(error)) < 1000


def test_a_stored_plan_is_proved_again_where_maps_are_given():
    rows, columns = contiguous_split_map((4, 6), [1, 3], 0), contiguous_split_map((4, 6), [2, 4], 1)
    plan = plan_transfer(columns, rows)
    stored = plan.to_dict()
    assert TransferPlan.from_dict(stored, columns, rows) == plan
    # As DeepSpeed would have written it: the sizes come from the maps.
    bare = {key: stored[key] for key in ('logical_shape', 'segments')}
    assert TransferPlan.from_dict(bare, columns, rows) == plan
    with pytest.raises(InvalidMapError):
        TransferPlan.from_dict({**bare, 'segments': bare['segments'][1:]}, columns, rows)
    with pytest.raises(InvalidMapError, match='source_numel says 7 elements of location 5'):
        TransferPlan.from_dict({**stored, 'source_numel': stored['source_numel'] + [[5, 7]]}, columns, rows)
    with pytest.raises(InvalidMapError, match='target_numel says 9 elements of location 0'):
        TransferPlan.from_dict({**stored, 'target_numel': [[0, 9], [1, 16]]}, columns, rows)
    with pytest.raises(ValueError, match='both'):
        TransferPlan.from_dict(stored, columns)


@pytest.mark.parametrize('scale', [0.0, float('inf'), float('nan'), 10**400])
def test_a_scale_is_invertible(scale):
    with pytest.raises(AffineTransferError, match='not invertible'):
        TransferSegment(0, 0, (1, ), 0, 0, (1, ), (1, ), scale, 1.0)
    with pytest.raises(AffineTransferError, match='not invertible'):
        TransferSegment(0, 0, (1, ), 0, 0, (1, ), (1, ), 1.0, scale)


def test_columns_must_fit_one_another():
    columns = example_plan().columns
    fields = [getattr(columns, name) for name in columns.__dataclass_fields__]
    with pytest.raises(AffineTransferError, match='source_rank column'):
        SegmentColumns(np.zeros(3), *fields[1:])
    with pytest.raises(AffineTransferError, match='shape column has 1 dimensions'):
        SegmentColumns(*fields[:6], np.zeros(2), *fields[7:])
    with pytest.raises(AffineTransferError, match='beyond int64'):
        SegmentColumns.from_segments([TransferSegment(0, 2**63, (1, ), 0, 0, (1, ), (1, ))])


def test_endpoints_say_which_location_they_do_not_know():
    endpoints = TransferEndpoints(source={0: 1, 2: 0, 4: 1}, target={0: 3})
    assert endpoints.source_process(2) == 0 and endpoints.target_process(0) == 3
    assert endpoints.source_processes(np.array([4, 2, 4, 0])).tolist() == [1, 0, 1, 1]
    assert endpoints.target_processes(np.array([], np.int64)).tolist() == []
    with pytest.raises(AffineTransferError, match='target location 2 has no process'):
        endpoints.target_processes(np.array([0, 2]))
    assert endpoints.source_locations(1) == (0, 4) and endpoints.target_locations(1) == ()
    with pytest.raises(AffineTransferError, match=r'source location 5 has no process: .* name \[0, 2, 4\]'):
        endpoints.source_process(5)
    with pytest.raises(AffineTransferError, match='target location 2 has no process'):
        endpoints.target_process(2)


@pytest.mark.parametrize('identity', [-2**63, 2**63 - 1])
def test_any_int64_names_a_location(identity):
    layout = relabel(replicated_map((4, ), 1), {0: identity})
    plan = plan_transfer(layout, layout)
    assert TransferPlan.from_dict(plan.to_dict(), layout, layout) == plan
    assert TransferEndpoints({identity: 0}, {}).source_process(identity) == 0


@pytest.mark.parametrize('identity', [-2**63 - 1, 2**63])
def test_nothing_else_names_a_location_of_a_stored_plan(identity):
    with pytest.raises(AffineTransferError, match='plan segment 0 source location is .*; expected'):
        TransferPlan.from_dict(changed(['segments', 0, 'source', 0], identity))


@pytest.mark.parametrize('source', [{
    'q': 0
}, {
    0: 'q'
}, {
    0: -1
}, {
    0: True
}, {
    0: 1.0
}, [0], None, {
    2**70: 0
}, {
    2**63: 0
}, {
    -2**63 - 1: 0
}, {
    0: 2**63
}, {
    0: 10**5000
}, {
    10**5000: 0
}])
def test_endpoints_refuse_what_is_no_process(source):
    with pytest.raises(AffineTransferError, match='source endpoints'):
        TransferEndpoints(source, {})


@pytest.mark.parametrize('limits', [{'max_ndim': -1}, {'max_segments': 1.5}, {'max_plan_bytes': None}])
def test_a_budget_is_made_of_counts(limits):
    with pytest.raises(AffineTransferError, match=next(iter(limits))):
        PlanBudget(**limits)
