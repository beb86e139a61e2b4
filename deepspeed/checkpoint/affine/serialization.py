# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The stored form of a map, format version 1: plain lists, dicts and numbers.

Reading trusts nothing. Every value is looked at before it is used, sizes are bounded before anything of that size is
made, and the work is linear in the input.
"""

import re

import numpy as np

from deepspeed.checkpoint.affine.checks import MAX_AXES, MAX_ELEMENTS, is_invertible, shown, span
from deepspeed.checkpoint.affine.columns import assemble_columns, float_reach, reach, spans
from deepspeed.checkpoint.affine_geometry.strides import product

# Stored in the envelope of a checkpoint; see envelope.py.
AFFINE_MAP_FORMAT_VERSION = 1

_DECIMAL = re.compile(r'0|-?[1-9][0-9]{0,18}')


def map_to_dict(logical_shape, columns):
    """Return the stored form of a map, ranks ascending; see ``ParamAffineMap.to_dict``."""
    pieces = _piece_dicts(columns)
    starts = columns.shard_starts.tolist()
    shapes, ndims = columns.shard_shape.tolist(), columns.shard_ndim.tolist()
    ids = columns.shard_ids.tolist()
    return {
        'logical_shape': list(logical_shape),
        'ranks': {
            ids[shard]: {
                'shard_shape': shapes[shard][:ndims[shard]],
                'pieces': pieces[starts[shard]:starts[shard + 1]],
            }
            for shard in np.argsort(columns.shard_ids).tolist()
        },
    }


def _piece_dicts(columns):
    sets = {held_by: sorted(columns.holder_ids(held_by)) for held_by in np.unique(columns.holders).tolist()}
    pieces = []
    for shape, source, source_strides, dest, dest_strides, held_by, scale in columns.rows():
        piece = {
            'shape': shape,
            'source': [source, source_strides],
            'dest': [dest, dest_strides],
            'locations': list(sets[held_by]),
        }
        if scale != 1.0:
            piece['scale'] = scale
        pieces.append(piece)
    return pieces


def read_map(entry):
    """Return ``(logical_shape, columns)`` of a stored map; see ``ParamAffineMap.from_dict``.

    Everything is checked but whether the shards are exact.

    Raises:
        ValueError: anything else than a map; the message begins with the place, such as ``ranks[3].pieces[2].shape``.
    """
    _check_keys(entry, 'the map', ('logical_shape', 'ranks'))
    logical_shape = _read_sizes(entry['logical_shape'], 'logical_shape')
    ranks = _read_ranks(entry['ranks'])
    shard_shapes, pieces, places = [], [], []
    for index, (rank, value) in enumerate(ranks.items()):
        place = f'ranks[{rank}]'
        _check_keys(value, place, ('shard_shape', 'pieces'))
        shard_shapes.append(_read_sizes(value['shard_shape'], f'{place}.shard_shape'))
        if not isinstance(value['pieces'], (list, tuple)):
            raise ValueError(f'{place}.pieces: expected a list, found {shown(value["pieces"])}.')
        for position, piece in enumerate(value['pieces']):
            pieces.append(_read_piece(piece, f'{place}.pieces[{position}]'))
            places.append((index, position))

    names = ('shapes', 'source_offsets', 'source_strides', 'dest_offsets', 'dest_strides', 'locations', 'scales')
    fields = dict(zip(names, map(list, zip(*pieces)))) if pieces else {name: [] for name in names}
    columns = assemble_columns(ranks=list(ranks),
                               shard_shapes=shard_shapes,
                               shard=[index for index, _ in places],
                               **fields)
    _check_bounds(columns, product(logical_shape), places)
    return logical_shape, columns


def _read_ranks(ranks):
    if not isinstance(ranks, dict):
        raise ValueError(f'ranks: expected a dict, found {shown(ranks)}.')
    read = {}
    for key, value in ranks.items():
        decimal = isinstance(key, str) and _DECIMAL.fullmatch(key)
        rank = _read_int(int(key) if decimal else key, 'a key of ranks', -2**63)
        if rank in read:
            raise ValueError(f'ranks[{rank}]: the rank is given twice, as a number and as a string.')
        read[rank] = value
    return read


def _read_piece(piece, place):
    """Return shape, source offset and strides, dest offset and strides, locations and scale of one stored piece."""
    _check_keys(piece, place, ('shape', 'source', 'dest', 'locations'), ('scale', ))
    shape = _read_sizes(piece['shape'], f'{place}.shape')
    source_offset, source_strides = _read_address(piece['source'], f'{place}.source', len(shape))
    dest_offset, dest_strides = _read_address(piece['dest'], f'{place}.dest', len(shape))
    locations = _read_locations(piece['locations'], f'{place}.locations')
    scale = _read_scale(piece.get('scale', 1.0), f'{place}.scale')
    return shape, source_offset, source_strides, dest_offset, dest_strides, locations, scale


def _read_address(value, place, axes):
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f'{place}: expected [offset, strides], found {shown(value)}.')
    strides = _read_ints(value[1], f'{place}[1]', 0, MAX_ELEMENTS, MAX_AXES)
    if len(strides) != axes:
        raise ValueError(f'{place}[1]: found {len(strides)} strides for a shape of {axes} axes.')
    return _read_int(value[0], f'{place}[0]', 0), strides


def _read_locations(value, place):
    ids = _read_ints(value, place, -2**63, 2**63 - 1, None)
    distinct = frozenset(ids)
    if not ids or len(distinct) != len(ids):
        raise ValueError(f'{place}: expected the ids of the locations that hold the piece, each once; found '
                         f'{"none" if not ids else "an id given twice"}.')
    return distinct


def _read_scale(value, place):
    if type(value) not in (int, float) or not is_invertible(value):
        raise ValueError(f'{place}: expected a finite number other than zero, found {shown(value)}; any other scale '
                         'is not invertible.')
    return float(value)


def _read_sizes(value, place):
    shape = _read_ints(value, place, 0, MAX_ELEMENTS, MAX_AXES)
    if span(shape) > MAX_ELEMENTS:
        raise ValueError(f'{place}: the shape spans more than 2**62 elements, which no address can reach.')
    return shape


def _read_ints(value, place, low, high, longest):
    if not isinstance(value, (list, tuple)):
        raise ValueError(f'{place}: expected a list of integers, found {shown(value)}.')
    if longest is not None and len(value) > longest:
        raise ValueError(f'{place}: found {len(value)} entries, more than the {longest} axes a tensor may have.')
    # type() and not isinstance(): a bool is an int to Python, but not in a stored map.
    if all(type(item) is int and low <= item <= high for item in value):
        return tuple(value)
    for index, item in enumerate(value):
        _read_int(item, f'{place}[{index}]', low, high)


def _read_int(value, place, low, high=None):
    high = (2**63 - 1 if low < 0 else MAX_ELEMENTS) if high is None else high
    if type(value) is not int:
        raise ValueError(f'{place}: expected an integer, found {shown(value)}.')
    if not low <= value <= high:
        raise ValueError(f'{place}: expected an integer from {low} to {high}, found {shown(value)}.')
    return value


def _check_keys(entry, place, required, optional=()):
    if not isinstance(entry, dict):
        raise ValueError(f'{place}: expected a dict, found {shown(entry)}.')
    for key in required:
        if key not in entry:
            raise ValueError(f'{place}: the key {key!r} is missing.')
    for key in entry:
        if key not in required and key not in optional:
            raise ValueError(f'{place}: the key {shown(key)} is not known in format version '
                             f'{AFFINE_MAP_FORMAT_VERSION}.')


def _check_bounds(columns, numel, places):
    """Raise ``ValueError`` for pieces that span too much, or that lie outside of the parameter or of their shard."""
    far = {
        'shape': spans(columns.shape) > MAX_ELEMENTS,
        'source': float_reach(columns.source_offset, columns.shape, columns.source_strides) > MAX_ELEMENTS,
        'dest': float_reach(columns.dest_offset, columns.shape, columns.dest_strides) > MAX_ELEMENTS,
    }
    for field, beyond in far.items():
        if beyond.any():
            place = _place(columns, places, int(np.argmax(beyond)))
            raise ValueError(f'{place}.{field}: the piece reaches beyond 2**62 elements.')
    held = columns.volume > 0
    sides = (('source', columns.source_offset, columns.source_strides, np.full(columns.piece_count, numel)),
             ('dest', columns.dest_offset, columns.dest_strides, columns.shard_numel[columns.shard]))
    for field, offset, strides, stop in sides:
        _, last = reach(offset, columns.shape, strides)
        outside = held & (last >= stop)
        if outside.any():
            piece = int(np.argmax(outside))
            whole = 'parameter' if field == 'source' else 'shard'
            raise ValueError(f'{_place(columns, places, piece)}.{field}: the piece reaches element {last[piece]}, but '
                             f'the {whole} has {stop[piece]} elements.')


def _place(columns, places, piece):
    shard, position = places[piece]
    return f'ranks[{columns.location_ids[shard]}].pieces[{position}]'
