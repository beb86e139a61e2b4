# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The plan of a model as tables of numbers, and back.

Tables stand per class, per variant, and for the segments of all variants one after the other. What has an entry
per axis is flat. Processes of segments follow from the endpoints. Every number is checked before anything is made
of it.
"""

from dataclasses import dataclass
from typing import Dict

import numpy as np

from deepspeed.checkpoint.affine.checks import MAX_AXES, MAX_ELEMENTS, shown, span
from deepspeed.checkpoint.affine_transfer import parsing
from deepspeed.checkpoint.affine_transfer.balance import BalanceReport
from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError
from deepspeed.checkpoint.affine_transfer.model_plan import ModelPlan, PlannedClass, PlannedVariant
from deepspeed.checkpoint.affine_transfer.segments import PER_AXIS, SegmentColumns

_PER_SEGMENT = ('source_rank', 'source_offset', 'target_rank', 'target_offset')
_SCALES = ('source_scale', 'target_scale')
_TABLES = ('variant_of', 'variant_class', 'variant_segments', 'class_width', 'class_ndim', 'class_shape',
           'class_source', 'class_target', 'shards', 'shard_location', 'shard_numel', 'source_location',
           'source_process', 'target_location', 'target_process', *_PER_SEGMENT, *PER_AXIS, 'scaled', *_SCALES)


def tables_of(plan):
    """The tables of a ``ModelPlan``, int64 and float64 arrays by name. Its names are not among them."""
    return {**_class_tables(plan.classes), **_variant_tables(plan), **_endpoint_tables(plan.endpoints)}


def plan_of(header, stored):
    """The ``ModelPlan`` that a header (a dict, see ``model_file``) and tables make up; neither is trusted.

    Raises:
        AffineTransferError: tables that are missing, contradict each other or the header, or are out of bounds.
    """
    parsing.expect_keys(stored, 'model plan', ('header', *_TABLES))
    return _plan(header, {name: _numbers(name, stored[name]) for name in _TABLES})


def _class_tables(classes):
    tables, numbers = {}, []
    for group in classes:
        for numels in (group.source_numel, group.target_numel):
            table = tuple(np.array([*part], np.int64) for part in (numels.keys(), numels.values()))
            known = tables.setdefault(tuple(part.tobytes() for part in table), (len(tables), *table))
            numbers.append(known[0])
    return {
        'class_width': _ints([group.width for group in classes]),
        'class_ndim': _ints([len(group.logical_shape) for group in classes]),
        'class_shape': _ints([size for group in classes for size in group.logical_shape]),
        'class_source': _ints(numbers[0::2]),
        'class_target': _ints(numbers[1::2]),
        'shards': _ints([len(table[1]) for table in tables.values()]),
        'shard_location': _joined(table[1] for table in tables.values()),
        'shard_numel': _joined(table[2] for table in tables.values()),
    }


def _variant_tables(plan):
    columns = [variant.columns for variant in plan.variants]
    scales = {name: _joined((getattr(part, name) for part in columns), np.float64) for name in _SCALES}
    scaled = np.flatnonzero((scales['source_scale'] != 1.0) | (scales['target_scale'] != 1.0))
    return {
        'variant_of': _ints(plan.variant_of),
        'variant_class': _ints([variant.number for variant in plan.variants]),
        'variant_segments': _ints([len(part) for part in columns]),
        **{
            name: _joined(getattr(part, name).reshape(-1) for part in columns)
            for name in (*_PER_SEGMENT, *PER_AXIS)
        },
        'scaled': scaled,
        **{
            name: values[scaled]
            for name, values in scales.items()
        },
    }


def _endpoint_tables(endpoints):
    tables = {}
    for side, processes in (('source', endpoints.source), ('target', endpoints.target)):
        locations = sorted(processes)
        tables[f'{side}_location'] = _ints(locations)
        tables[f'{side}_process'] = _ints([processes[location] for location in locations])
    return tables


def _ints(values):
    return np.array(values, np.int64)


def _joined(parts, dtype=np.int64):
    return np.concatenate([np.zeros(0, dtype), *parts])


def _numbers(name, array):
    """A table as int64 or float64."""
    kind, dtype = ('f', np.float64) if name in _SCALES else ('i', np.int64)
    if array.dtype.kind != kind:
        raise AffineTransferError(f'model plan {name} is stored as {array.dtype}; expected '
                                  f'{"floating point numbers" if kind == "f" else "signed integers"}')
    return array.astype(dtype)


def _plan(header, tables):
    names = _names(header['names'])
    process = header['process']
    if process is not None:
        process = parsing.integer(process, 'model plan process', 0)
    classes, shards = _classes(tables)
    variant_of = _numbered(tables, 'variant_of', len(tables['variant_class']), len(names))
    endpoints = TransferEndpoints(_processes(tables, 'source'), _processes(tables, 'target'))
    variants = _variants(tables, classes, shards, endpoints, process)
    _check_total(variants, classes, variant_of)
    return ModelPlan(names, _sources(header['sources'], names), variant_of, variants, classes, endpoints, process,
                     _balance(header['balance']))


def _names(names):
    parsing.expect_list(names, 'model plan names')
    for place, name in enumerate(names):
        if not isinstance(name, str) or (place and name <= names[place - 1]):
            raise AffineTransferError(f'model plan names[{place}] is {shown(name)}; expected strings, ascending, each '
                                      'once')
    return tuple(names)


def _sources(entries, names):
    parsing.expect_list(entries, 'model plan sources')
    sources = list(names)
    for place, entry in enumerate(entries):
        where = f'model plan sources[{place}]'
        parsing.expect_list(entry, where)
        if len(entry) != 2 or not isinstance(entry[1], str):
            raise AffineTransferError(f'{where} is not the number of a parameter and the name of its source')
        if parsing.integer(entry[0], f'{where}[0]', 0) >= len(names):
            raise AffineTransferError(f'{where} is of parameter {entry[0]}; there are {len(names)}')
        sources[entry[0]] = entry[1]
    return tuple(sources)


def _balance(entry):
    if entry is None:
        return None
    figures = parsing.integers(entry, 'model plan balance', 0)
    if len(figures) != 4:
        raise AffineTransferError(f'model plan balance has {len(figures)} figures; expected 4')
    return BalanceReport(*figures)


@dataclass(frozen=True)
class _Shards:
    """Buffer sizes by location, as a dict and as arrays int64[n] in the order of locations."""
    numels: Dict[int, int]
    locations: np.ndarray
    sizes: np.ndarray


def _classes(tables):
    """The classes, and for each the ``_Shards`` of source and target. Classes with equal shards share them."""
    count = len(tables['class_width'])
    source, target = (_bounded(tables, f'class_{side}', 0,
                               len(tables['shards']) - 1, count) for side in ('source', 'target'))
    if len(np.unique(np.concatenate([source, target]))) != len(tables['shards']):
        raise AffineTransferError('model plan shards has entries that no class refers to')
    shards = _shards(tables)
    ndim = _bounded(tables, 'class_ndim', 0, MAX_AXES, count)
    width = _bounded(tables, 'class_width', 1, MAX_ELEMENTS, count)
    shapes = _parts('class_ndim', _bounded(tables, 'class_shape', 0, MAX_ELEMENTS, int(ndim.sum())), ndim)
    classes = []
    for number, (shape, one, other) in enumerate(zip(shapes, source.tolist(), target.tolist())):
        shape = tuple(shape.tolist())
        if span(shape) > MAX_ELEMENTS:
            raise AffineTransferError(f'model plan class {number} has parameters of more than 2**62 elements')
        classes.append(PlannedClass(shape, shards[one].numels, shards[other].numels, int(width[number])))
    return tuple(classes), [(shards[one], shards[other]) for one, other in zip(source.tolist(), target.tolist())]


def _shards(tables):
    total = len(tables['shard_location'])
    counts = _bounded(tables, 'shards', 0, total)
    numel = _bounded(tables, 'shard_numel', 0, MAX_ELEMENTS, total)
    result = []
    for number, (ids, sizes) in enumerate(
            zip(_parts('shards', tables['shard_location'], counts), _parts('shards', numel, counts))):
        numels = dict(zip(ids.tolist(), sizes.tolist()))
        if len(numels) != len(ids):
            raise AffineTransferError(f'model plan shards {number} name a location twice')
        order = np.argsort(ids)
        result.append(_Shards(numels, ids[order], sizes[order]))
    return result


def _processes(tables, side):
    locations = tables[f'{side}_location']
    if (locations[1:] <= locations[:-1]).any():
        raise AffineTransferError(f'model plan {side}_location is not ascending')
    processes = _bounded(tables, f'{side}_process', 0, parsing.LARGEST_ID, len(locations))
    return dict(zip(locations.tolist(), processes.tolist()))


def _variants(tables, classes, shards, endpoints, process):
    number = _numbered(tables, 'variant_class', len(classes), len(tables['variant_class']))
    total = len(tables['source_rank'])
    counts = _bounded(tables, 'variant_segments', 0, total, len(number))
    ndim = _ints([len(group.logical_shape) for group in classes])[number]
    split = {name: _parts('variant_segments', _column(tables, name, total), counts) for name in _PER_SEGMENT}
    for name in PER_AXIS:
        column = _column(tables, name, int((counts * ndim).sum()))
        split[name] = _parts('variant_segments', column, counts * ndim)
    for name, column in _scales(tables, total).items():
        split[name] = _parts('variant_segments', column, counts)
    variants = []
    for place, (group, axes) in enumerate(zip(number.tolist(), ndim.tolist())):
        where = f'model plan variant {place}'
        parts = {name: part[place] for name, part in split.items()}
        columns = SegmentColumns(**{**parts, **{name: parts[name].reshape(counts[place], axes) for name in PER_AXIS}})
        _check_segments(columns, *shards[group], where)
        variant = PlannedVariant(group, columns, endpoints.source_processes(columns.source_rank),
                                 endpoints.target_processes(columns.target_rank))
        if process is not None and len(variant.of_process(process).columns) != len(columns):
            raise AffineTransferError(f'{where} has segments that process {process}, whose plan it is, takes no '
                                      'part in')
        variants.append(variant)
    return tuple(variants)


def _column(tables, name, size):
    if name.endswith('rank'):
        return _bounded(tables, name, parsing.SMALLEST_ID, parsing.LARGEST_ID, size)
    return _bounded(tables, name, 1 if name == 'shape' else 0, MAX_ELEMENTS, size)


def _scales(tables, total):
    rows = _bounded(tables, 'scaled', 0, total - 1)
    if (rows[1:] <= rows[:-1]).any():
        raise AffineTransferError('model plan scaled is not ascending')
    scales = {}
    for name in _SCALES:
        if len(tables[name]) != len(rows) or not np.isfinite(tables[name]).all() or (tables[name] == 0).any():
            raise AffineTransferError(f'model plan {name} is not a finite factor other than 0 for each of the '
                                      f'{len(rows)} scaled segments')
        scales[name] = np.ones(total)
        scales[name][rows] = tables[name]
    return scales


def _check_segments(columns, source, target, where):
    """Every segment must end inside its shards. Sums that could wrap are made in floating point first."""
    volume = columns.shape.prod(axis=1, dtype=np.float64)
    for side, shards in (('source', source), ('target', target)):
        rank, offset, strides = (getattr(columns, f'{side}_{name}') for name in ('rank', 'offset', 'strides'))
        reach = offset + ((columns.shape - 1.0) * strides).sum(axis=1)
        beyond = np.flatnonzero(np.maximum(reach, volume) > MAX_ELEMENTS)
        place = np.searchsorted(shards.locations, rank)
        known = np.isin(rank, shards.locations)
        if not len(beyond) and known.all():
            last = offset + ((columns.shape - 1) * strides).sum(axis=1)
            beyond = np.flatnonzero(last >= shards.sizes[place])
        if not known.all():
            bad = int(np.argmin(known))
            raise AffineTransferError(f'{where} segment {bad}: {side} location {rank[bad]} has no shard')
        if len(beyond):
            raise AffineTransferError(f'{where} segment {beyond[0]} ends outside the shard of {side} location '
                                      f'{rank[beyond[0]]}')


def _check_total(variants, classes, variant_of):
    """Totals are summed in int64 later."""
    members = np.bincount(variant_of, minlength=len(variants)).tolist()
    total = sum(
        float(variant.columns.shape.prod(axis=1, dtype=np.float64).sum()) * count * classes[variant.number].width
        for variant, count in zip(variants, members))
    if total > MAX_ELEMENTS:
        raise AffineTransferError('the model plan moves more than 2**62 bytes')


def _bounded(tables, name, low, high, size=None):
    """A table with all its numbers in bounds."""
    array = tables[name]
    if size is not None and len(array) != size:
        raise AffineTransferError(f'model plan {name} has {len(array)} entries; expected {size}')
    wrong = np.flatnonzero((array < low) | (array > high))
    if len(wrong):
        raise AffineTransferError(f'model plan {name}[{wrong[0]}] is {array[wrong[0]]}; expected {low} to {high}')
    return array


def _numbered(tables, name, count, size):
    """A table of references to ``count`` things, each of which something refers to."""
    array = _bounded(tables, name, 0, count - 1, size)
    unused = np.flatnonzero(np.bincount(array, minlength=count) == 0)
    if len(unused):
        raise AffineTransferError(f'model plan {name} never refers to {unused[0]}')
    return array


def _parts(name, array, counts):
    """An array cut into stretches of these lengths."""
    if int(counts.sum()) != len(array):
        raise AffineTransferError(f'model plan {name} adds up to {counts.sum()}; expected {len(array)}')
    stops = np.cumsum(counts).tolist()
    return [array[start:stop] for start, stop in zip([0, *stops], stops)]
