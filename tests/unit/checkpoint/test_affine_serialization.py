# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The stored form of maps: what is written, what is read back, and what a hostile input can (not) do."""

import copy
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import affine_strategies
from deepspeed.checkpoint.affine import (AFFINE_MAP_FORMAT_VERSION, AffinePiece, ParamAffineMap, block_gather_map,
                                         contiguous_split_map, dump_affine_maps, load_affine_maps, replicated_map,
                                         segmented_map, zero3_partition_map)


def _name(value):
    """A short name of a parametrized value; Python refuses to print huge integers."""
    return f'{value.bit_length()}-bits' if type(value) is int and value.bit_length() > 64 else repr(value)[:9]


# -------------------------------------------------------------------------------------- what is written


def test_the_stored_form_by_hand():
    entry = segmented_map((6, 2), [(4, False), (2, True)], 0, 2, [[3, 1]]).to_dict()
    assert entry == {
        'logical_shape': [6, 2],
        'ranks': {
            0: {
                'shard_shape': [5, 2],
                'pieces': [
                    {
                        'shape': [3, 2],
                        'source': [0, [2, 1]],
                        'dest': [0, [2, 1]],
                        'locations': [0]
                    },
                    {
                        'shape': [2, 2],
                        'source': [8, [2, 1]],
                        'dest': [6, [2, 1]],
                        'locations': [0, 1]
                    },
                ]
            },
            1: {
                'shard_shape': [3, 2],
                'pieces': [
                    {
                        'shape': [1, 2],
                        'source': [6, [2, 1]],
                        'dest': [0, [2, 1]],
                        'locations': [1]
                    },
                    {
                        'shape': [2, 2],
                        'source': [8, [2, 1]],
                        'dest': [2, [2, 1]],
                        'locations': [0, 1]
                    },
                ]
            },
        },
    }


def test_a_scale_is_written_only_where_there_is_one():
    assert replicated_map((2, ), 1, scale=0.25).to_dict()['ranks'][0]['pieces'][0]['scale'] == 0.25
    assert 'scale' not in replicated_map((2, ), 1).to_dict()['ranks'][0]['pieces'][0]


def test_only_plain_numbers_and_own_lists_are_written():
    """A reader may have neither numpy nor torch, and changing a part of what was written changes nothing else."""
    entry = replicated_map((2, 3), 2, scale=0.5).to_dict()

    def visit(value):
        if type(value) is dict:
            assert all(type(key) in (str, int) for key in value)
            value = list(value.values())
        if type(value) is list:
            return [kind for item in value for kind in visit(item)]
        return [type(value)]

    assert set(visit(entry)) == {int, float}
    entry['ranks'][0]['pieces'][0]['locations'].append(9)
    assert entry['ranks'][1]['pieces'][0]['locations'] == [0, 1]
    assert replicated_map((2, 3), 2, scale=0.5).to_dict() != entry


def test_ranks_are_written_in_their_order_and_ids_ascend():
    entry = zero3_partition_map((4, ), 2, locations=[[9, -3], [4, 12]]).to_dict()
    assert list(entry['ranks']) == [-3, 4, 9, 12]
    assert entry['ranks'][9]['pieces'][0]['locations'] == [4, 9]


# -------------------------------------------------------------------------------------- what is read back


@settings(max_examples=200)
@given(affine_strategies.shapes().flatmap(affine_strategies.layouts))
def test_maps_survive_writing_and_reading(layout):
    entry = layout.map.to_dict()
    for stored in (entry, json.loads(json.dumps(entry)), copy.deepcopy(entry)):
        read = ParamAffineMap.from_dict(stored)
        assert read == layout.map and hash(read) == hash(layout.map) and read.to_dict() == entry
        assert read.pieces_by_rank == layout.map.pieces_by_rank and read.shard_shapes == layout.map.shard_shapes


@settings(max_examples=50)
@given(
    affine_strategies.shapes(min_axes=1).flatmap(
        lambda shape: affine_strategies.scaled_layouts(shape, st.sampled_from([0.5, -2.0, 1 / 3, 1e-300]))))
def test_scales_survive_writing_and_reading(layout):
    entry = json.loads(json.dumps(layout.map.to_dict()))
    assert ParamAffineMap.from_dict(entry) == layout.map


def test_maps_that_are_not_complete_are_read():
    """What survived of a layout is a map; coverage is asked for where it is needed."""
    part = contiguous_split_map((6, ), [2, 2], 0)
    assert ParamAffineMap.from_dict(part.to_dict()) == part


def test_reading_keeps_pieces_as_they_are():
    """Neighbours are not merged and empty pieces not dropped: DeepSpeed compares what is stored."""
    pieces = [
        AffinePiece((1, ), 1, (1, ), 1, (1, ), {0}),
        AffinePiece((1, ), 0, (1, ), 0, (1, ), {0}),
        AffinePiece((0, ), 2, (1, ), 2, (1, ), {0})
    ]
    entry = ParamAffineMap((2, ), {0: (2, )}, {0: pieces}).to_dict()
    read = ParamAffineMap.from_dict(entry)
    assert read.pieces_by_rank[0] == pieces and read.to_dict() == entry


def test_reading_does_not_change_or_keep_its_input():
    entry = contiguous_split_map((4, 2), [2, 2], 0).to_dict()
    before = copy.deepcopy(entry)
    read = ParamAffineMap.from_dict(entry)
    assert entry == before
    entry['ranks'][0]['pieces'][0]['shape'][0] = 99
    assert read.to_dict() == before


# ------------------------------------------------------------------------------------------ hostile input

_SHAPE = ['ranks', 0, 'pieces', 0, 'shape']
_SOURCE = ['ranks', 0, 'pieces', 0, 'source']
_DEST = ['ranks', 0, 'pieces', 0, 'dest']
_LOCATIONS = ['ranks', 0, 'pieces', 0, 'locations']
_SCALE = ['ranks', 0, 'pieces', 0, 'scale']
_PIECE = r'ranks\[0\].pieces\[0\]'
_GONE = object()


def _entry():
    """Rows 0-1 and 2-3 of a 4 x 3 parameter, the first in two pieces."""
    entry = contiguous_split_map((4, 3), [2, 2], 0).to_dict()
    entry['ranks'][0]['pieces'] = [{
        'shape': [1, 3],
        'source': [row * 3, [3, 1]],
        'dest': [row * 3, [3, 1]],
        'locations': [0]
    } for row in (0, 1)]
    return entry


def _changed(path, value):
    entry = _entry()
    owner = entry
    for key in path[:-1]:
        owner = owner[key]
    if value is _GONE:
        del owner[path[-1]]
    else:
        owner[path[-1]] = value
    return entry


def test_the_entry_that_is_changed_below_is_itself_fine():
    assert ParamAffineMap.from_dict(_entry()).uncovered_offsets() == []


@pytest.mark.parametrize('entry', [None, [], 'map', 3, {}, {'logical_shape': [4, 3]}, {'ranks': {}}])
def test_what_is_no_map_is_refused(entry):
    with pytest.raises(ValueError, match='the map'):
        ParamAffineMap.from_dict(entry)


_NO_INTEGERS = [True, False, 1.0, float('nan'), '1', None, [1], {}, b'1', 1j, np.int64(1)]


@pytest.mark.parametrize('value', _NO_INTEGERS, ids=repr)
@pytest.mark.parametrize('path, place', [
    (['logical_shape', 0], r'logical_shape\[0\]'),
    (['ranks', 1, 'shard_shape', 1], r'ranks\[1\].shard_shape\[1\]'),
    (_SHAPE + [1], _PIECE + r'.shape\[1\]'),
    (_SOURCE + [0], _PIECE + r'.source\[0\]'),
    (_SOURCE + [1, 0], _PIECE + r'.source\[1\]\[0\]'),
    (_DEST + [0], _PIECE + r'.dest\[0\]'),
    (_DEST + [1, 1], _PIECE + r'.dest\[1\]\[1\]'),
    (_LOCATIONS + [0], _PIECE + r'.locations\[0\]'),
])
def test_what_is_no_integer_is_refused(path, place, value):
    with pytest.raises(ValueError, match=place + ': expected an integer'):
        ParamAffineMap.from_dict(_changed(path, value))


@pytest.mark.parametrize('value', [-1, -2**70, 2**62 + 1, 2**63, 2**70, 10**5000], ids=_name)
@pytest.mark.parametrize('path, place', [
    (['logical_shape', 0], r'logical_shape\[0\]'),
    (['ranks', 1, 'shard_shape', 1], r'ranks\[1\].shard_shape\[1\]'),
    (_SHAPE + [1], _PIECE + r'.shape\[1\]'),
    (_SOURCE + [0], _PIECE + r'.source\[0\]'),
    (_SOURCE + [1, 0], _PIECE + r'.source\[1\]\[0\]'),
    (_DEST + [0], _PIECE + r'.dest\[0\]'),
    (_DEST + [1, 1], _PIECE + r'.dest\[1\]\[1\]'),
])
def test_negative_and_absurd_numbers_are_refused(path, place, value):
    with pytest.raises(ValueError, match=place + ': expected an integer from 0'):
        ParamAffineMap.from_dict(_changed(path, value))


@pytest.mark.parametrize('value', ['[4, 3]', None, 4, {0: 4}, {4, 3}, frozenset({0}), np.array([4, 3])], ids=repr)
@pytest.mark.parametrize('path, place', [
    (['logical_shape'], 'logical_shape'),
    (['ranks', 1, 'shard_shape'], r'ranks\[1\].shard_shape'),
    (['ranks', 1, 'pieces'], r'ranks\[1\].pieces'),
    (_SHAPE, _PIECE + '.shape'),
    (_SOURCE, _PIECE + '.source'),
    (_SOURCE + [1], _PIECE + r'.source\[1\]'),
    (_DEST, _PIECE + '.dest'),
    (_LOCATIONS, _PIECE + '.locations'),
])
def test_what_is_no_list_is_refused(path, place, value):
    with pytest.raises(ValueError, match=place + ': expected'):
        ParamAffineMap.from_dict(_changed(path, value))


@pytest.mark.parametrize('value', [None, [], 'ranks', 4], ids=repr)
@pytest.mark.parametrize('path, place', [(['ranks'], 'ranks'), (['ranks', 1], r'ranks\[1\]'),
                                         (['ranks', 0, 'pieces', 0], _PIECE)])
def test_what_is_no_dict_is_refused(path, place, value):
    with pytest.raises(ValueError, match=place + ': expected a dict'):
        ParamAffineMap.from_dict(_changed(path, value))


@pytest.mark.parametrize('path, place', [
    (['logical_shape'], 'the map'),
    (['ranks'], 'the map'),
    (['ranks', 1, 'shard_shape'], r'ranks\[1\]'),
    (['ranks', 1, 'pieces'], r'ranks\[1\]'),
    (_SHAPE, _PIECE),
    (_SOURCE, _PIECE),
    (_DEST, _PIECE),
    (_LOCATIONS, _PIECE),
])
def test_missing_keys_are_refused(path, place):
    with pytest.raises(ValueError, match=f"{place}: the key '{path[-1]}' is missing"):
        ParamAffineMap.from_dict(_changed(path, _GONE))


@pytest.mark.parametrize('key', ['scales', 'version', 7, None, 'x' * 10000, (1, )], ids=_name)
@pytest.mark.parametrize('path, place', [([], 'the map'), (['ranks', 1], r'ranks\[1\]'),
                                         (['ranks', 0, 'pieces', 0], _PIECE)])
def test_unknown_keys_are_refused(path, place, key):
    with pytest.raises(ValueError, match=place + ': the key .* is not known') as refusal:
        ParamAffineMap.from_dict(_changed(path + [key], 1))
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    'key',
    ['one', '01', ' 1', '1.0', '', '-0', '+1', '1_0', '٣', 1.0, True, None, (1, ), 2**63, '9' * 19, '9' * 10000],
    ids=_name)
def test_keys_that_are_no_ranks_are_refused(key):
    entry = _entry()
    entry['ranks'][key] = entry['ranks'].pop(1)
    with pytest.raises(ValueError, match='ranks'):
        ParamAffineMap.from_dict(entry)


def test_a_rank_given_twice_is_refused():
    entry = _entry()
    entry['ranks']['1'] = entry['ranks'][1]
    with pytest.raises(ValueError, match=r'ranks\[1\]: the rank is given twice'):
        ParamAffineMap.from_dict(entry)


@pytest.mark.parametrize(
    'value',
    [0, 0.0, float('nan'), float('inf'), -float('inf'), 10**400, '0.5', None, True, [0.5], 1j], ids=_name)
def test_scales_that_cannot_be_undone_are_refused(value):
    with pytest.raises(ValueError, match=_PIECE + '.scale: .*not invertible'):
        ParamAffineMap.from_dict(_changed(_SCALE, value))


@pytest.mark.parametrize('value', [[], [0, 0], [0, 2**63], [0, -2**63 - 1]])
def test_locations_that_cannot_be_are_refused(value):
    with pytest.raises(ValueError, match=_PIECE + '.locations'):
        ParamAffineMap.from_dict(_changed(_LOCATIONS, value))


@pytest.mark.parametrize('path, value, place', [
    (_SOURCE, [0, [3, 1], 0], _PIECE + '.source'),
    (_SOURCE, [0, [3]], _PIECE + r'.source\[1\]: found 1 strides for a shape of 2 axes'),
    (_DEST, [0, [3, 1, 1]], _PIECE + r'.dest\[1\]: found 3 strides'),
    (_DEST, [0], _PIECE + '.dest'),
    (['logical_shape'], [1] * 65, 'logical_shape: found 65'),
    (_SHAPE, [1] * 10**6, _PIECE + '.shape: found 1000000'),
    (['logical_shape'], [2**31, 2**32], 'logical_shape: the shape spans'),
    (['logical_shape'], [0, 2**31, 2**32], 'logical_shape: the shape spans'),
    (['ranks', 1, 'shard_shape'], [2**40, 2**40], r'ranks\[1\].shard_shape: the shape spans'),
    (_SHAPE, [2**40, 2**40], _PIECE + '.shape: the shape spans'),
    (_SOURCE, [0, [3, 2**62]], _PIECE + '.source: the piece reaches'),
    (_DEST, [2**62, [2**62, 2**62]], _PIECE + '.dest: the piece reaches'),
])
def test_malformed_and_absurd_geometry_is_refused(path, value, place):
    with pytest.raises(ValueError, match=place):
        ParamAffineMap.from_dict(_changed(path, value))


@pytest.mark.parametrize('path, value, message', [
    (_SOURCE + [0], 10, _PIECE + '.source: the piece reaches element 12, but the parameter has 12'),
    (_SOURCE + [1, 1], 6, _PIECE + '.source: the piece reaches element 12'),
    (_DEST + [0], 4, _PIECE + '.dest: the piece reaches element 6, but the shard has 6'),
    (['logical_shape', 0], 1, r'ranks\[0\].pieces\[1\].source: the piece reaches element 5, but the parameter has 3'),
    (_DEST + [0], 3, 'twice'),
    (_DEST + [1, 1], 0, 'twice'),
    (_SHAPE + [1], 2, 'Rank 0.*account for 5'),
    (['ranks', 0, 'pieces', 1], _GONE, 'Rank 0.*account for 3'),
    (['ranks', 1, 'pieces'], [], 'Rank 1.*account for 0'),
    (['ranks', 1, 'shard_shape'], [2, 4], 'Rank 1.*account for 6'),
])
def test_shards_that_are_not_exact_are_refused(path, value, message):
    with pytest.raises(ValueError, match=message):
        ParamAffineMap.from_dict(_changed(path, value))


def test_exact_shards_whose_strides_interleave_are_read():
    """Addresses 0 and 3, 1, 2 and 4 of one shard: strides 3 and 2, of which neither divides the other."""
    pieces = [((2, ), 0, (1, ), 0, (3, )), ((1, ), 2, (1, ), 1, (1, )), ((2, ), 3, (1, ), 2, (2, ))]
    affine_map = ParamAffineMap((5, ), {0: (5, )}, {0: [AffinePiece(*piece, {0}) for piece in pieces]})
    assert ParamAffineMap.from_dict(affine_map.to_dict()) == affine_map
    entry = affine_map.to_dict()
    entry['ranks'][0]['pieces'][1]['dest'][0] = 4
    with pytest.raises(ValueError, match='Rank 0 has no piece at shard address 1,'):
        ParamAffineMap.from_dict(entry)


def test_volumes_that_wrap_to_the_size_of_a_shard_are_not_walked():
    """Four pieces of 2**62 elements add up to 0 in 64 bits; strides 3 and 2 beside them leave geometry undecided."""
    pieces = [([2], 0, [3]), ([1], 1, [1]), ([2], 2, [2]), ([2**33 - 5], 5, [1])] + [([2**31, 2**31], 0, [1, 1])] * 4
    entry = {
        'logical_shape': [2**33],
        'ranks': {
            0: {
                'shard_shape': [2**33],
                'pieces': [{
                    'shape': shape,
                    'source': [0, steps],
                    'dest': [dest, steps],
                    'locations': [0]
                } for shape, dest, steps in pieces]
            }
        }
    }
    with pytest.raises(ValueError, match='neither divides the other|twice'):
        ParamAffineMap.from_dict(entry)


_JUNK = st.one_of(st.none(), st.booleans(), st.integers(-2, 20), st.integers(), st.floats(), st.text(max_size=3),
                  st.lists(st.integers(-1, 9), max_size=3), st.dictionaries(st.text(max_size=3), st.none(),
                                                                            max_size=2))


def _paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, path + (key, ))


@settings(max_examples=400)
@given(st.sampled_from([path for path in _paths(_entry()) if path]), _JUNK)
def test_any_change_is_refused_or_harmless(path, junk):
    """Whatever is put anywhere: a ValueError, or a map that is exact and reads back as itself."""
    try:
        read = ParamAffineMap.from_dict(_changed(list(path), junk))
    except ValueError as refusal:
        assert str(refusal)
    else:
        read.validate()
        assert ParamAffineMap.from_dict(read.to_dict()) == read


def test_what_is_absurd_costs_no_memory():
    """A few hundred bytes that speak of 2**62 elements must not make anything of that size."""
    claims = [
        _changed(['ranks', 0, 'shard_shape'], [2**62]),
        _changed(_SHAPE, [2**31, 2**31]),
        _changed(_SOURCE, [2**62, [1, 1]])
    ]
    tracemalloc.start()
    try:
        for entry in claims:
            with pytest.raises(ValueError):
                ParamAffineMap.from_dict(entry)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize('dest', [lambda index: [0, [1]], lambda index: [index % 64, [2**(index % 8)]]])
def test_many_collisions_cost_little(dest):
    """Thousands of pieces on the same addresses collide in millions of pairs, which are not all looked at."""
    entry = {
        'logical_shape': [2**20],
        'ranks': {
            0: {
                'shard_shape': [4000 * 100],
                'pieces': [{
                    'shape': [100],
                    'source': [0, [1]],
                    'dest': dest(index),
                    'locations': [0]
                } for index in range(4000)]
            }
        }
    }
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match='twice'):
            ParamAffineMap.from_dict(entry)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**28


def test_many_pieces_are_read_as_columns():
    """50,000 pieces of one element each, interleaved over two ranks."""
    gathered = block_gather_map((50000, ), {0: range(0, 50000, 2), 1: range(1, 50000, 2)}, 1, 0)
    read = ParamAffineMap.from_dict(gathered.to_dict())
    assert read == gathered and read.columns.piece_count == 50000
    entry = gathered.to_dict()
    entry['ranks'][1]['pieces'][24999]['dest'][0] = 24998
    with pytest.raises(ValueError, match='rank 1 piece 2499[89]'):
        ParamAffineMap.from_dict(entry)


# ------------------------------------------------------------------------------------------- the envelope


def test_an_envelope_holds_maps_by_name():
    maps = {'layer.weight': contiguous_split_map((4, 3), [2, 2], 0), 'layer.bias': replicated_map((4, ), 2)}
    envelope = dump_affine_maps(maps)
    assert type(AFFINE_MAP_FORMAT_VERSION) is int
    assert envelope == {'version': 1, 'params': {name: item.to_dict() for name, item in maps.items()}}
    assert load_affine_maps(envelope) == maps == load_affine_maps(json.loads(json.dumps(envelope)))
    assert load_affine_maps(dump_affine_maps({})) == {}


@pytest.mark.parametrize('version, message', [(2, 'version 2, which is newer'), (10**5000, 'newer'), (0, 'version 0'),
                                              (-1, 'version -1'), ('1', 'integer'), (1.0, 'integer'),
                                              (True, 'integer'), (None, 'integer')],
                         ids=_name)
def test_other_versions_are_refused(version, message):
    with pytest.raises(ValueError, match=message):
        load_affine_maps({'version': version, 'params': {}})


@pytest.mark.parametrize('envelope, message', [
    (None, 'dict'),
    ([], 'dict'),
    ({}, 'no version'),
    ({
        'params': {}
    }, 'no version'),
    ({
        'version': 1
    }, 'params'),
    ({
        'version': 1,
        'params': []
    }, 'params'),
    ({
        'version': 1,
        'params': {},
        'parameters': {}
    }, 'besides version and params'),
    ({
        'version': 1,
        'params': {
            3: {}
        }
    }, 'string'),
])
def test_what_is_no_envelope_is_refused(envelope, message):
    with pytest.raises(ValueError, match=message):
        load_affine_maps(envelope)


def test_only_maps_by_name_are_written():
    with pytest.raises(TypeError, match='maps must be a mapping'):
        dump_affine_maps([replicated_map((4, ), 1)])
    with pytest.raises(TypeError, match="'bias' must be a ParamAffineMap, but it is None"):
        dump_affine_maps({'bias': None})


def test_a_bad_map_is_named():
    envelope = dump_affine_maps({'good': replicated_map((4, ), 2), 'layer.bad': replicated_map((4, ), 2)})
    envelope['params']['layer.bad']['ranks'][1]['pieces'][0]['shape'] = [-4]
    with pytest.raises(ValueError, match=r"'layer.bad' .*ranks\[1\].pieces\[0\].shape\[0\]"):
        load_affine_maps(envelope)
