# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Putting a parameter together from its shards, and cutting a shard out of it.

Everything that can be wrong is found from the columns and the tensors' sizes before an element is copied.
"""

from collections.abc import Mapping

import numpy as np
import torch

from deepspeed.checkpoint.affine.checks import listed
from deepspeed.checkpoint.affine.elements import (check_exact_shards, check_source, count_uncovered_elements,
                                                  first_revisit)
from deepspeed.checkpoint.affine.piece import check_tensor
from deepspeed.checkpoint.affine_geometry.addresses import join_dense_axes
from deepspeed.checkpoint.affine_geometry.columns import row_ids
from deepspeed.checkpoint.affine_geometry.strides import product

# Power of `scale` by which a shard holds each state: gradients carry 1/s, and the moments are of first and second
# degree in them.
SCALE_POWER_BY_STATE = {'fp32': 1, 'exp_avg': -1, 'exp_avg_sq': -2}

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def rebuild(affine_map, shards, scale_power):
    """Return the whole parameter; see ``ParamAffineMap.rebuild``."""
    columns = affine_map.columns
    check_exact_shards(columns)
    _refuse_scaled_state(columns, scale_power)
    flat_shards = _flat_shards(affine_map, shards)
    check_source(affine_map)
    _check_writable(columns)
    count, offset = count_uncovered_elements(affine_map)
    if count:
        raise ValueError(f'The shards leave {count} elements of a parameter of shape {affine_map.logical_shape} out, '
                         f'the first at flat offset {offset}, so it cannot be rebuilt.')
    some = next(iter(shards.values()))
    _check_arithmetic(columns, some.dtype)
    full = torch.empty(affine_map.numel, dtype=some.dtype, device=some.device)
    write = _writer(affine_map, full)
    for rank, start in zip(columns.shard_ids.tolist(), columns.shard_starts.tolist()):
        for number, piece in enumerate(affine_map.pieces_by_rank.get(rank, ()), start):
            if piece.numel:
                block = piece.dest_view(flat_shards[rank]).to(full.device)
                write(number, piece, _scaled(block, piece.scale, scale_power))
    return full.view(affine_map.logical_shape)


def extract(affine_map, full_param, rank, scale_power):
    """Return the shard of one location; see ``ParamAffineMap.extract``."""
    check_tensor(full_param, 'The parameter')
    columns = affine_map.columns
    _refuse_scaled_state(columns, scale_power)
    if rank not in affine_map.shard_shapes:
        raise ValueError(f'Rank {rank} has no shard in this map; it has shards of {listed(affine_map.shard_shapes)}.')
    if full_param.numel() != affine_map.numel:
        raise ValueError(f'The parameter has {full_param.numel()} elements, but the map describes {affine_map.numel}, '
                         f'shape {affine_map.logical_shape}.')
    check_exact_shards(columns)
    check_source(affine_map)
    _check_arithmetic(columns, full_param.dtype)
    shape = affine_map.shard_shapes[rank]
    flat = full_param.detach().reshape(-1)
    shard = torch.empty(product(shape), dtype=full_param.dtype, device=full_param.device)
    for piece in affine_map.pieces_by_rank.get(rank, ()):
        if not piece.numel:
            continue
        target = piece.dest_view(shard)
        target.copy_(piece.source_view(flat))
        if piece.scale != 1.0:
            target.mul_(piece.scale**scale_power)
    return shard.view(shape)


def _scaled(tensor, scale, scale_power):
    """Return a shard's elements as the whole parameter holds them: the shard's factor divided out."""
    factor = scale**scale_power
    return tensor if factor == 1.0 else tensor / factor


def _refuse_scaled_state(columns, scale_power):
    if scale_power != 1 and (columns.scale != 1.0).any():
        piece = int(np.argmax(columns.scale != 1.0))
        raise NotImplementedError(
            f'Rank {columns.rank(piece)} holds a piece times {columns.scale[piece]}, and an optimizer state cannot '
            "move through a scale: the state itself could, but the optimizer's learning rate and epsilon would stay "
            'in the source coordinate, so that training went on along another path.')


def _check_arithmetic(columns, dtype):
    if not has_division(dtype) and (columns.scale != 1.0).any():
        piece = int(np.argmax(columns.scale != 1.0))
        raise ValueError(
            f'Rank {columns.rank(piece)} holds a piece times {columns.scale[piece]}, which {dtype} '
            'values cannot be divided by; move integers, booleans and eight-bit floats through unscaled maps '
            'only.')


def has_division(dtype):
    """Whether values can be scaled: torch has no arithmetic of eight-bit floats, and that of integers is not exact."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


def _check_writable(columns):
    """Raise ``ValueError`` where a piece has several elements for one of the parameter, which cannot be written."""
    twice = first_revisit(columns.shape, columns.source_offset, columns.source_strides)
    if twice is not None:
        raise ValueError(f'Rank {columns.rank(twice[0])} has a piece that holds flat offset {twice[1]} more than '
                         'once, so a parameter cannot be rebuilt from it.')


def _flat_shards(affine_map, shards):
    """Check the tensors that ``rebuild`` is given, and return them flat; those of any regular stride as views."""
    if not isinstance(shards, Mapping) or not shards:
        raise ValueError('rebuild needs a mapping from rank to shard with one shard at least; without any, the dtype '
                         'of the parameter is not known.')
    expected = {rank: product(shape) for rank, shape in affine_map.shard_shapes.items()}
    for rank, shard in shards.items():
        if rank not in expected:
            raise ValueError(f'A shard is given for rank {rank}, but the map describes shards of {listed(expected)}.')
        check_tensor(shard, f'The shard of rank {rank}')
        if shard.numel() != expected[rank]:
            raise ValueError(f'The shard of rank {rank} has {shard.numel()} elements, but the map describes '
                             f'{expected[rank]}, shape {affine_map.shard_shapes[rank]}.')
    missing = [rank for rank, numel in expected.items() if numel and rank not in shards]
    if missing:
        raise ValueError(f'The shards of {listed(missing)} are missing; only empty shards may be left out.')
    dtypes = {rank: shard.dtype for rank, shard in shards.items()}
    if len(set(dtypes.values())) != 1:
        raise ValueError(f'The shards have different dtypes, {sorted(map(str, set(dtypes.values())))}; convert them '
                         'to one before rebuilding.')
    return {rank: shard.detach().reshape(-1) for rank, shard in shards.items()}


def _writer(affine_map, full):
    """Return what puts a block into the flat parameter ``full`` and holds it against what is there already.

    It takes the number of a piece, the piece and its block. Replicas mostly are the same elements again, and then one
    look at which elements a piece has tells whether to copy or to compare. Where blocks overlap in another way, a byte
    per element keeps what has been written.
    """
    columns = affine_map.columns
    filled = np.flatnonzero(columns.volume)
    # However a piece lists its axes, the same elements get the same row.
    extent, strides = join_dense_axes(columns.shape[filled], columns.source_strides[filled])
    ids, first = row_ids(columns.source_offset[filled], extent, strides)
    if columns.volume[filled[first]].sum() == affine_map.numel:
        return _block_writer(full, dict(zip(filled.tolist(), ids.tolist())))
    return _element_writer(full)


def _block_writer(full, elements):
    """``elements`` maps a piece to an id of its elements: equal ids are the same elements, others share none."""
    written = set()

    def write(number, piece, block):
        target = piece.source_view(full)
        if elements[number] not in written:
            written.add(elements[number])
            target.copy_(block)
        elif not _same_data(target, block):
            raise _disagreement(piece)

    return write


def _element_writer(full):
    written = torch.zeros(full.numel(), dtype=torch.bool, device=full.device)

    def write(number, piece, block):
        target, marks = piece.source_view(full), piece.source_view(written)
        if not _same_data(target[marks], block[marks]):
            raise _disagreement(piece)
        target.copy_(block)
        marks.fill_(True)

    return write


def _same_data(ours, theirs):
    """Whether two blocks hold the same values, or the same bits: NaN agrees with itself, 0.0 with -0.0."""
    if torch.equal(_bits(ours), _bits(theirs)):
        return True
    if not (ours.is_floating_point() or ours.is_complex()):
        return False
    differing = _bits(ours) != _bits(theirs)
    if ours.is_complex():
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
    ours, theirs = ours[differing], theirs[differing]
    if ours.element_size() == 1:
        # Eight-bit floats have no comparison of their own; float32 holds all of their values.
        ours, theirs = ours.to(torch.float32), theirs.to(torch.float32)
    return torch.equal(ours, theirs)


def _bits(tensor):
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()])


def _disagreement(piece):
    return ValueError(f'Ranks {listed(sorted(piece.locations))} hold different data in the block of shape '
                      f'{piece.shape} at flat offset {piece.source_offset}. Replicas must agree; find the shard that '
                      'is stale or damaged.')
