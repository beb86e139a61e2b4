# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Model plans in files: equal after a round trip, small, refused when damaged, and proved again on request."""

import io
import itertools
import json
import operator
import os
import random
import tracemalloc
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from affine_models import contested_models, models, replica_model, same_columns, same_plans
from deepspeed.checkpoint.affine import contiguous_split_map, relabel, replicated_map, zero3_partition_map
from deepspeed.checkpoint.affine_transfer import (AffineTransferError, InvalidMapError, ParameterTransfer,
                                                  TransferEndpoints, load_model_plan, plan_transfers, save_model_plan)

POLICIES = ('first_holder', 'local_first_least_loaded', 'balanced')


def _model():
    """Two geometries, tied weights, one scaled parameter."""
    source = zero3_partition_map((12, 6), 4, locations=[[0, 1, 2, 3], [7, 6, 5, 4]])
    target = contiguous_split_map((12, 6), [3, 3, 6], 0)
    scaled = ParameterTransfer(replicated_map((6, ), 2), replicated_map((6, ), 2, 0.5), torch.float32, scale_power=1)
    columns = contiguous_split_map((12, 6), [2, 2, 2], 1)
    transfers = {
        'embed': ParameterTransfer(target, source, torch.float32, torch.bfloat16),
        'lm_head': ParameterTransfer(columns, source, torch.float32, torch.bfloat16, source='embed'),
        'norm': scaled,
    }
    transfers.update({f'layer.{index}': ParameterTransfer(columns, source, torch.float32) for index in range(6)})
    return transfers, TransferEndpoints({location: location for location in range(8)}, {0: 0, 1: 9, 2: 10})


def _plan(policy='balanced', **options):
    transfers, endpoints = _model()
    return plan_transfers(transfers, endpoints=endpoints, replica_policy=policy, **options)


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / 'plan.npz'
    save_model_plan(_plan(), path)
    return path


def _read(path):
    """The arrays of a file; the header as a dict."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    return {**arrays, 'header': json.loads(arrays['header'].tobytes())}


def _write(path, arrays, save=np.savez):
    text = np.frombuffer(json.dumps(arrays['header']).encode(), np.uint8)
    save(path, **{**arrays, 'header': text})


# ------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize('policy', POLICIES)
@settings(max_examples=30)
@given(models() | contested_models())
def test_what_is_read_is_what_was_written(tmp_path_factory, policy, some):
    path = tmp_path_factory.mktemp('plans') / 'plan.npz'
    for process in (None, 4):
        plan = some.plan(policy, process=process)
        save_model_plan(plan, path)
        found = load_model_plan(path, some.transfers if process is None else None)
        assert same_plans(found, plan)
        assert found.variant_of.tolist() == plan.variant_of.tolist()
        assert all(same_columns(one.columns, other.columns) for one, other in zip(found.variants, plan.variants))
        for one, other in zip(found.variants, plan.variants):
            assert one.source_process.tolist() == other.source_process.tolist()
            assert one.target_process.tolist() == other.target_process.tolist()
        assert found.classes == plan.classes
        assert (found.sent_bytes(), found.local_bytes()) == (plan.sent_bytes(), plan.local_bytes())


def test_a_plan_by_a_callable_and_an_empty_one_come_back(tmp_path):
    for plan in (_plan(lambda request: request.candidates[-1].source_rank),
                 plan_transfers({}, endpoints=TransferEndpoints({}, {}))):
        save_model_plan(plan, tmp_path / 'plan')
        assert same_plans(load_model_plan(tmp_path / 'plan'), plan)


def test_names_may_be_any_strings(tmp_path):
    entry, endpoints = _model()[0]['norm'], _model()[1]
    names = ['', 'a\nb', 'a\0b', '\ud800', 'größe', '层.0', '"', '\\']
    plan = plan_transfers(dict.fromkeys(names, replace(entry, source='\n"')), endpoints=endpoints)
    save_model_plan(plan, tmp_path / 'plan.npz')
    found = load_model_plan(tmp_path / 'plan.npz')
    assert list(found) == sorted(names) and set(found.sources) == {'\n"'}


def test_equal_plans_make_equal_files(tmp_path):
    save_model_plan(_plan(), tmp_path / 'one.npz')
    save_model_plan(_plan(), str(tmp_path / 'other.npz'))
    assert (tmp_path / 'one.npz').read_bytes() == (tmp_path / 'other.npz').read_bytes()


def test_a_file_is_smaller_than_the_columns_in_memory(tmp_path):
    some = replica_model([1000 + reader for reader in range(2000)], 8, 3000)
    plan = some.plan('balanced')
    save_model_plan(plan, tmp_path / 'plan.npz')
    columns = sum(variant.columns.nbytes for variant in plan.variants)
    names = sum(len(name) + 3 for name in plan.names)
    assert columns == 8 * 2000 * 96
    assert (tmp_path / 'plan.npz').stat().st_size < columns / 3 + 2 * names


def test_a_file_is_replaced_whole_or_not_at_all(stored, monkeypatch):
    before = stored.read_bytes()

    def refuse(*arguments):
        raise OSError('no space left')

    for target in ('os.fsync', 'os.replace'):
        with monkeypatch.context() as patched:
            patched.setattr(target, refuse)
            with pytest.raises(OSError, match='no space left'):
                save_model_plan(_plan('first_holder'), stored)
        assert stored.read_bytes() == before and os.listdir(stored.parent) == ['plan.npz']
    save_model_plan(_plan('first_holder'), stored)
    assert stored.read_bytes() != before and os.listdir(stored.parent) == ['plan.npz']


def test_only_plans_of_models_are_stored(tmp_path):
    with pytest.raises(TypeError, match='ModelPlan'):
        save_model_plan(_plan()['norm'], tmp_path / 'plan.npz')
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------ hostile files


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_model_plan(tmp_path / 'plan.npz')


def test_a_truncated_file_is_refused(stored):
    content = stored.read_bytes()
    for length in [0, 1, 21, 22, *range(23, len(content), 97), len(content) - 1]:
        stored.write_bytes(content[:length])
        with pytest.raises(AffineTransferError):
            load_model_plan(stored)


def test_a_damaged_file_is_refused_or_still_says_the_same(stored):
    content, plan = stored.read_bytes(), load_model_plan(stored)
    rng, refused = random.Random(0), 0
    for _ in range(600):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        stored.write_bytes(damaged)
        try:
            assert same_plans(load_model_plan(stored), plan)
        except AffineTransferError:
            refused += 1
    assert refused > 400


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """Arrays of a file, its plan, what it was asked for, and where to write others."""
    path = tmp_path_factory.mktemp('plans') / 'plan.npz'
    save_model_plan(_plan(), path)
    return _read(path), load_model_plan(path), _model()[0], path


# This takes about five seconds.
@settings(max_examples=400)
@given(data=st.data())
def test_any_number_in_a_table_is_refused_or_the_plan_is_another_that_is_right(whole, data):
    """Numbers are changed as somebody would who knows the format; with the transfers, what is read is proved."""
    arrays, plan, transfers, path = whole
    name = data.draw(st.sampled_from(sorted(name for name, table in arrays.items()
                                            if name != 'header' and len(table))))
    changed = arrays[name].copy()
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(changed) - 1))
        near = st.integers(-2, 80) | st.sampled_from([2**31, 2**62, 2**63 - 1, -2**63])
        changed[place] = data.draw(near if changed.dtype == np.int64 else st.floats() if changed.dtype.kind ==
                                   'f' else st.integers(0, 127))
    _write(path, {**arrays, name: changed})
    try:
        read = load_model_plan(path, transfers)
    except (AffineTransferError, InvalidMapError) as refusal:
        assert str(refusal)
    else:
        assert set(read) == set(plan) and read.segments == plan.segments
        for one in read:
            elements = [_elements(each[one]) for each in (read, plan)]
            assert elements[0].keys() == elements[1].keys()


def _elements(plan):
    """``{(target, its address): (source, its address)}``, element by element."""
    found = {}
    for segment in plan.segments:
        for index in itertools.product(*map(range, segment.shape)):
            target = segment.target_offset + sum(map(operator.mul, index, segment.target_strides))
            source = segment.source_offset + sum(map(operator.mul, index, segment.source_strides))
            assert (segment.target_rank, target) not in found
            found[segment.target_rank, target] = segment.source_rank, source
    return found


def _header(key, value):

    def change(arrays):
        arrays['header'][key] = value

    return change


def _entry(name, index, value):

    def change(arrays):
        arrays[name] = arrays[name].astype(np.asarray(value).dtype if name.endswith('scale') else np.int64)
        arrays[name][index] = value

    return change


def _table(name, value):

    def change(arrays):
        arrays[name] = value(arrays.get(name))

    return change


HOSTILE = {
    'another format': (_header('format', 'npz'), 'model plan'),
    'a newer version': (_header('version', 2), 'newer'),
    'a version that is no number': (_header('version', True), 'version'),
    'version 0': (_header('version', 0), 'version'),
    'an unknown key': (_header('compression', 'none'), 'unknown key'),
    'a negative process': (_header('process', -1), 'process'),
    'the plan of a process that is not in it': (_header('process', 77), 'process 77'),
    'balance as text': (_header('balance', '0000'), 'balance'),
    'three figures of balance': (_header('balance', [1, 2, 3]), 'balance'),
    'names as a number': (_header('names', 9), 'names'),
    'names that are numbers': (_header('names', list(range(9))), 'names'),
    'a name twice': (_header('names', ['a'] * 9), 'names'),
    'too few names': (_header('names', ['a']), 'variant_of'),
    'a source of no parameter': (_header('sources', [[9, 'embed']]), 'sources'),
    'a source that is a number': (_header('sources', [[1, 2]]), 'sources'),
    'no table': (lambda arrays: arrays.pop('shape'), 'shape'),
    'another table': (_table('more', lambda _: np.zeros(1)), 'more'),
    'a table of objects': (_table('shape', lambda _: np.array([{}], object)), 'no array'),
    'a table of text': (_table('shape', lambda table: table.astype('U8')), 'no array'),
    'a table of floats': (_table('shape', lambda table: table.astype(float)), 'shape'),
    'scales that are integers': (_table('source_scale', lambda table: np.ones(len(table), np.int64)), 'source_scale'),
    'a table of pairs': (_table('shape', lambda table: table.reshape(-1, 2)), 'no array'),
    'a big-endian table': (_table('shape', lambda table: table.astype('>i8')), 'no array'),
    'a short table': (_table('source_offset', lambda table: table[1:]), 'source_offset'),
    'a long table': (_table('target_strides', lambda table: np.append(table, table[:1])), 'target_strides'),
    'a variant that is not there': (_entry('variant_of', 0, 99), r'variant_of\[0\] is 99'),
    'a negative variant': (_entry('variant_of', 0, -1), r'variant_of\[0\] is -1'),
    'a variant of nothing': (_table('variant_of', lambda table: table * 0), 'never refers'),
    'a class that is not there': (_entry('variant_class', 0, 77), r'variant_class\[0\]'),
    'a class of nothing': (_table('variant_class', lambda table: table * 0), 'never refers'),
    'shards that are not there': (_entry('class_source', 0, 50), 'class_source'),
    'shards of nothing': (_table('class_target', lambda table: table * 0), 'no class refers'),
    'more segments than there are': (_entry('variant_segments', 0, 10**6), 'variant_segments'),
    'fewer segments than there are': (_entry('variant_segments', 0, 0), 'expected'),
    'a negative offset': (_entry('source_offset', 3, -1), r'source_offset\[3\] is -1'),
    'an offset beyond the shard': (_entry('source_offset', 3, 10**6), 'outside the shard'),
    'an offset beyond int64 with its block': (_entry('target_offset', 3, 2**62), 'outside the shard'),
    'a negative stride': (_entry('source_strides', 3, -6), r'source_strides\[3\]'),
    'strides that wrap around': (_table('source_strides', lambda table: np.full(len(table), 2**62)), 'outside the'),
    'an empty segment': (_entry('shape', 0, 0), r'shape\[0\] is 0'),
    'shapes that wrap around': (_table('shape', lambda table: np.full(len(table), 2**40)), 'outside the shard'),
    'a location without a shard': (_entry('source_rank', 0, 55), 'no shard'),
    'an axis too many': (_entry('class_ndim', 0, 65), 'class_ndim'),
    'a size below zero': (_entry('class_shape', 0, -12), 'class_shape'),
    'a parameter beyond int64': (_table('class_shape', lambda table: np.full(len(table), 2**40)), r'2\*\*62'),
    'no bytes per element': (_entry('class_width', 0, 0), 'class_width'),
    'bytes beyond int64': (_entry('class_width', 0, 2**62), '62 bytes'),
    'a shard twice': (_entry('shard_location', 1, 0), 'twice'),
    'a shard of negative size': (_entry('shard_numel', 0, -1), 'shard_numel'),
    'a location twice': (_entry('source_location', 1, 0), 'ascending'),
    'a negative process of a location': (_entry('target_process', 0, -2), 'target_process'),
    'a location that is nowhere': (_entry('source_location', 7, 70), 'has no process'),
    'a scale of zero': (_entry('source_scale', 0, 0.0), 'source_scale'),
    'a scale that is no number': (_entry('target_scale', 0, np.nan), 'target_scale'),
    'scaled segments that are not there': (_entry('scaled', 0, 10**6), 'scaled'),
    'a scaled segment twice': (_table('scaled', lambda table: table * 0), 'scaled'),
}


@pytest.mark.parametrize('change, message', HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused(stored, change, message):
    arrays = _read(stored)
    change(arrays)
    _write(stored, arrays)
    with pytest.raises(AffineTransferError, match=message):
        load_model_plan(stored)


@pytest.mark.parametrize('text', ['', '[]', '{', '9' * 10**5, '[' * 10**5, '{"format": NaN}', '\xff'])
def test_a_header_that_is_none_is_refused(stored, text):
    np.savez(stored, header=np.frombuffer(text.encode('latin1'), np.uint8))
    with pytest.raises(AffineTransferError, match='header'):
        load_model_plan(stored)


def test_a_compressed_file_is_refused(stored):
    _write(stored, {**_read(stored), 'shape': np.ones(10**7, np.int64)}, np.savez_compressed)
    size = stored.stat().st_size
    assert _peak_of_refusal(stored, 'compressed') < 10 * size + 10**6


@pytest.mark.parametrize('count', [10**15, 10**17])
def test_a_table_that_claims_to_be_large_is_refused(stored, count):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {'descr': '<i8', 'fortran_order': False, 'shape': (count, )})
    with zipfile.ZipFile(stored, 'a') as archive:
        archive.writestr('more.npy', content.getvalue())
    assert _peak_of_refusal(stored, 'claims') < 10 * stored.stat().st_size + 10**6


def test_members_that_lie_over_each_other_are_refused(stored):
    """Every entry of the directory points to one large member."""
    with zipfile.ZipFile(stored, 'w') as archive:
        archive.writestr('a.npy', bytes(10**5))
        first = archive.infolist()[0]
        for index in range(50):
            copy = zipfile.ZipInfo(f'{index}.npy')
            for field in ('CRC', 'compress_size', 'file_size', 'header_offset'):
                setattr(copy, field, getattr(first, field))
            archive.filelist.append(copy)
            archive.NameToInfo[copy.filename] = copy
    assert _peak_of_refusal(stored, 'larger than the file') < 2 * 10**6


def _peak_of_refusal(path, message):
    """Bytes that reading takes at most until it is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(AffineTransferError, match=message):
            load_model_plan(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------- proved again


@pytest.mark.parametrize('policy', POLICIES)
def test_a_truthful_plan_is_proved(tmp_path, policy):
    save_model_plan(_plan(policy), tmp_path / 'plan.npz')
    transfers = _model()[0]
    assert same_plans(load_model_plan(tmp_path / 'plan.npz', dict(reversed(transfers.items()))), _plan(policy))


def test_each_list_of_segments_is_proved_once(stored, monkeypatch):
    proved = []
    module = __import__(load_model_plan.__module__, fromlist=['check_plan'])
    original = module.check_plan
    monkeypatch.setattr(module, 'check_plan',
                        lambda plan, *maps, **options: proved.append(plan) or original(plan, *maps, **options))
    plan = load_model_plan(stored, _model()[0])
    assert len(proved) == len(plan.variants) < len(plan)


# Segment 0 fills its shards; segment 4 is a part of both of its own.
TAMPERED = {
    'another source offset': _entry('source_offset', 4, 1),
    'another target offset': _entry('target_offset', 4, 1),
    'another holder': _entry('source_rank', 0, 3),
    'other bytes per element': _table('class_width', lambda table: table * 2),
    'another size of a shard': _table('shard_numel', lambda table: table + 1),
    'another shape': _table('class_shape', lambda table: table + 1),
    'other scales': _table('source_scale', lambda table: table * 2),
}


@pytest.mark.parametrize('change', TAMPERED.values(), ids=TAMPERED)
def test_a_plan_that_was_tampered_with_is_caught(stored, change):
    arrays = _read(stored)
    change(arrays)
    _write(stored, arrays)
    load_model_plan(stored)
    with pytest.raises(InvalidMapError, match="parameter '"):
        load_model_plan(stored, _model()[0])


def test_every_changed_offset_of_every_segment_is_caught(stored):
    original = _read(stored)
    for name in ('source_offset', 'target_offset'):
        for index in range(len(original[name])):
            arrays = dict(original)
            _entry(name, index, int(original[name][index]) + 1)(arrays)
            _write(stored, arrays)
            with pytest.raises(AffineTransferError):
                load_model_plan(stored, _model()[0])


OTHER_TRANSFERS = {
    'a parameter more': lambda transfers: {
        **transfers, 'bias': transfers['norm']
    },
    'a parameter less': lambda transfers: {
        name: entry
        for name, entry in transfers.items() if name != 'norm'
    },
    'another source': lambda transfers: {
        **transfers, 'lm_head': replace(transfers['lm_head'], source=None)
    },
    'another target map': lambda transfers: {
        **transfers, 'lm_head': transfers['embed']
    },
    'other locations': lambda transfers: {
        **transfers, 'norm': replace(transfers['norm'], target_map=relabel(transfers['norm'].target_map, {0: 2}))
    },
    'another dtype': lambda transfers: {
        **transfers, 'norm': replace(transfers['norm'], target_dtype=torch.float64)
    },
    'no rescaling': lambda transfers: {
        **transfers, 'norm': replace(transfers['norm'], scale_power=None)
    },
}


@pytest.mark.parametrize('change', OTHER_TRANSFERS.values(), ids=OTHER_TRANSFERS)
def test_a_plan_of_another_model_is_refused(stored, change):
    with pytest.raises(InvalidMapError, match="parameter '"):
        load_model_plan(stored, change(_model()[0]))


def test_the_plan_of_one_process_cannot_be_proved_alone(tmp_path):
    save_model_plan(_plan(process=9), tmp_path / 'plan.npz')
    with pytest.raises(AffineTransferError, match='process 9 alone'):
        load_model_plan(tmp_path / 'plan.npz', _model()[0])
    assert same_plans(load_model_plan(tmp_path / 'plan.npz'), _plan(process=9))


def test_what_is_no_model_cannot_be_proved_against(stored):
    with pytest.raises(TypeError):
        load_model_plan(stored, list(_model()[0]))
