# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Safetensors files: folders of them as checkpoints, and files that are filled in place.

The format is that of https://huggingface.co/docs/safetensors: the length of the header as 8 bytes, little-endian; the
header, JSON from name to dtype, shape and first and last byte of the data; the data without gaps.
"""

import json
import mmap
import os
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch

from deepspeed.checkpoint.affine.checks import shown
from deepspeed.checkpoint.affine.envelope import load_affine_maps
from deepspeed.checkpoint.affine_adapters.held import HeldParameter
from deepspeed.checkpoint.affine_adapters.stored import Checkpoint, CheckpointError, check_regular, whole

INDEX = 'model.safetensors.index.json'
# Beside files of several ranks: {'version': 1, 'params': {name: map}}, and which file is whose.
MAPS = 'affine_maps.json'
_METADATA = '__metadata__'
_MOST_JSON_BYTES = 1 << 30
_NAMES = {
    torch.bool: 'BOOL',
    torch.uint8: 'U8',
    torch.int8: 'I8',
    torch.int16: 'I16',
    torch.int32: 'I32',
    torch.int64: 'I64',
    torch.float16: 'F16',
    torch.bfloat16: 'BF16',
    torch.float32: 'F32',
    torch.float64: 'F64',
    torch.float8_e4m3fn: 'F8_E4M3',
    torch.float8_e5m2: 'F8_E5M2',
}
# Not every torch has these.
_NAMES.update({
    getattr(torch, dtype): name
    for dtype, name in (('uint16', 'U16'), ('uint32', 'U32'), ('uint64', 'U64'), ('complex64', 'C64'),
                        ('float8_e8m0fnu', 'F8_E8M0')) if hasattr(torch, dtype)
})


def safetensors_checkpoint(folder):
    """Describe a folder of safetensors files: a model as Hugging Face saves it, or shards that ``ds_affine`` wrote.

    Args:
        folder: with an index, or one or more ``.safetensors`` files in it.

    Returns:
        ``Checkpoint``; location r stands for rank r's file, and 0 for all files of a model that is not cut.

    Raises:
        CheckpointError: missing or broken files, a name that leads out of the folder, two files with one tensor.

    Example::

        safetensors_checkpoint('Llama-3-8B').parameters['lm_head.weight'].buffers[0]
    """
    folder = Path(folder)
    if (folder / MAPS).exists():
        return _of_ranks(folder)
    tensors, listed_in = {}, _weight_map(folder)
    for path in _files_of(folder, listed_in):
        for name, tensor in read_tensors(path).items():
            if name in tensors:
                raise CheckpointError(f'{path}: has {name!r}, which another file of the folder has too.')
            if listed_in is not None and listed_in.get(name) != path.name:
                raise CheckpointError(f'{path}: has {name!r}, which {INDEX} does not say of it.')
            tensors[name] = tensor
    missing = [name for name in listed_in or () if name not in tensors]
    if missing:
        raise CheckpointError(f'{folder / listed_in[missing[0]]}: has no {missing[0]!r}, which {INDEX} says is in it.')
    return Checkpoint('safetensors', {name: whole(tensor) for name, tensor in tensors.items()}, {})


def _weight_map(folder):
    """``{tensor: file}`` where there is an index, else None."""
    if not (folder / INDEX).exists():
        return None
    names = read_json(folder / INDEX).get('weight_map')
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f'{folder / INDEX}: weight_map must be a dict from tensor to file.')
    return names


def _files_of(folder, weight_map):
    if weight_map is not None:
        return [inside(folder, name) for name in sorted(set(weight_map.values()))]
    paths = sorted(folder.glob('*.safetensors'))
    if not paths:
        raise CheckpointError(f'{folder}: has no safetensors files.')
    return paths


def _of_ranks(folder):
    """Shards of several ranks, with their maps."""
    stored = read_json(folder / MAPS)
    try:
        maps = load_affine_maps(envelope_of(stored))
        files = {int(rank): inside(folder, name) for rank, name in stored['files'].items()}
        rows = {name: _row(place) for name, place in stored.get('rows', {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f'{folder / MAPS}: {error}') from error
    shards = {rank: read_tensors(path) for rank, path in files.items()}
    held = {}
    known = {rows.get(name, (name, 0))[0] for name in maps}
    for rank, tensors in shards.items():
        for name in tensors:
            if name not in known:
                raise CheckpointError(f'{files[rank]}: has {name!r}, of which {MAPS} says nothing.')
    for name, layout in maps.items():
        stored_name, start = rows.get(name, (name, 0))
        buffers = {
            rank: _rows(shards.get(rank, {}).get(stored_name), start, shape, f'{folder}: rank {rank}: {name!r}')
            for rank, shape in layout.shard_shapes.items()
        }
        dtypes = {tensor.dtype for tensor in buffers.values()}
        if len(dtypes) != 1:
            raise CheckpointError(f'{folder}: shards of {name!r} are of {sorted(map(str, dtypes))}.')
        held[name] = HeldParameter(layout, buffers, dtypes.pop())
    return Checkpoint(f'safetensors over {len(files)} ranks', held, {})


def _row(place):
    """The stored tensor in which a parameter is, and the row at which it begins."""
    name, start = place
    if not isinstance(name, str) or type(start) is not int:
        raise ValueError(f'rows: {shown(place)} is no name of a tensor with a row')
    return name, start


def _rows(tensor, start, shape, what):
    """A shard that is some rows of a stored tensor, or all of it."""
    if tensor is None:
        raise CheckpointError(f'{what} is not in its file.')
    if tuple(tensor.shape) == shape and not start:
        return tensor
    if tensor.dim() != len(shape) or tuple(
            tensor.shape[1:]) != shape[1:] or not (0 <= start <= start + shape[0] <= len(tensor)):
        raise CheckpointError(f'{what} is said to be {shape[:1]} rows from row {start} of a tensor of shape '
                              f'{tuple(tensor.shape)}.')
    return tensor.narrow(0, start, shape[0])


def envelope_of(content):
    """The maps in the JSON of a file that may say besides in which files the shards are, as ``MAPS`` does."""
    return {key: content[key] for key in ('version', 'params') if key in content} if 'files' in content else content


def read_json(path):
    """A file that holds a JSON object; not trusted.

    Raises:
        CheckpointError: none, or more than 1 GiB.
    """
    check_regular(path)
    try:
        if path.stat().st_size > _MOST_JSON_BYTES:
            raise CheckpointError(f'{path}: has {path.stat().st_size} bytes; expected at most 1 GiB.')
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f'{path}: {error}') from error
    if not isinstance(content, dict):
        raise CheckpointError(f'{path}: holds a {type(content).__name__}; expected an object.')
    return content


def inside(folder, name):
    """The file of this name in a folder.

    Raises:
        CheckpointError: the name leads elsewhere, or there is none.
    """
    if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
        raise CheckpointError(f'{folder}: lists the file {name!r}, which is not in it.')
    return folder / name


def read_tensors(path):
    """``{name: tensor}`` of a file, as views of the mapped file; writing to them does not change it.

    Raises:
        CheckpointError: a truncated or broken file.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CheckpointError(f'{path}: reading it takes the package safetensors; pip install safetensors') from None
    check_regular(path)
    try:
        with safe_open(path, framework='pt') as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f'{path}: is no whole safetensors file: {error}') from error


def _view(mapped, start, dtype, shape):
    count = prod(shape)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start).view(shape) if count else torch.empty(
        shape, dtype=dtype)


@contextmanager
def new_file(path, tensors):
    """Make a file and fill it through memory: its tensors are views of the mapped file.

    Disk space is taken first, so a full disk is an error here and not a signal later. Left regularly, the file is on
    disk.

    Args:
        path: of a file that is not there yet.
        tensors: name -> (dtype, shape).

    Yields:
        ``{name: tensor}``, all zero.

    Raises:
        OSError: no space, or the file is there.
        ValueError: a dtype that the format lacks, or a name that it cannot store.

    Example::

        with new_file('model.safetensors', {'w': (torch.float32, (2, 3))}) as made:
            made['w'].copy_(values)
    """
    for name in tensors:
        if name == _METADATA or any('\ud800' <= letter <= '\udfff' for letter in name):
            raise ValueError(f'safetensors cannot store a tensor of the name {name!r}.')
    unknown = [f'{name} ({dtype})' for name, (dtype, _) in tensors.items() if dtype not in _NAMES]
    if unknown:
        raise ValueError(f'safetensors has no dtype for {unknown[0]}.')
    header, offsets, total = {_METADATA: {'format': 'pt'}}, {}, 0
    # Widest first, as the format wants it: all are then aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
        dtype, shape = tensors[name]
        size = prod(shape) * dtype.itemsize
        header[name] = {'dtype': _NAMES[dtype], 'shape': list(shape), 'data_offsets': [total, total + size]}
        offsets[name], total = total, total + size
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    begin = 8 + len(text)
    with open(path, 'x+b') as file:
        os.posix_fallocate(file.fileno(), 0, begin + total)
        file.write(len(text).to_bytes(8, 'little') + text)
        file.flush()
        mapped = mmap.mmap(file.fileno(), begin + total)
        yield {name: _view(mapped, begin + offsets[name], *tensors[name]) for name in tensors}
        mapped.flush()
        os.fsync(file.fileno())
