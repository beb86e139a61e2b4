# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How a model is to lie in safetensors files: whole, or as tensor-parallel shards."""

import re
from dataclasses import dataclass
from math import prod
from typing import Dict, List, Tuple

import torch

from deepspeed.checkpoint.affine.constructors import contiguous_split_map, replicated_map
from deepspeed.checkpoint.affine.envelope import dump_affine_maps
from deepspeed.checkpoint.affine.param_map import ParamAffineMap
from deepspeed.checkpoint.affine_adapters.safetensors_files import INDEX, MAPS


@dataclass(frozen=True)
class DiskFile:
    """One file: of which location, and which of its tensors, as name -> (dtype, shape)."""
    name: str
    location: int
    tensors: Dict[str, Tuple[torch.dtype, tuple]]

    @property
    def numbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.tensors.values())


@dataclass(frozen=True)
class Place:
    """Where a parameter goes: the map of its shards, which are the rows from ``start`` on of the tensor ``tensor`` in
    each location's file."""
    layout: ParamAffineMap
    tensor: str
    start: int = 0


@dataclass(frozen=True)
class DiskLayout:
    """All files of a model.

    Attributes:
        files: those with tensors.
        places: parameter name -> ``Place``.
        indices: what is written beside them: file name -> JSON.
    """
    files: List[DiskFile]
    places: Dict[str, Place]
    indices: Dict[str, dict]

    @property
    def numbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.numbytes for file in self.files)


def whole_layout(shapes, dtypes, file_bytes):
    """Every parameter whole, in files as Hugging Face names them.

    Args:
        shapes, dtypes: by parameter name, in the order in which they are to be stored.
        file_bytes: most bytes of tensors in one file; a larger tensor has a file of its own.

    Returns:
        ``DiskLayout`` over location 0.
    """
    files, size = [{}], 0
    for name, shape in shapes.items():
        numbytes = prod(shape) * dtypes[name].itemsize
        if files[-1] and size + numbytes > file_bytes:
            files.append({})
            size = 0
        files[-1][name] = dtypes[name], shape
        size += numbytes
    names = ['model.safetensors'] if len(files) == 1 else [
        f'model-{number:05d}-of-{len(files):05d}.safetensors' for number in range(1,
                                                                                  len(files) + 1)
    ]
    made = [DiskFile(name, 0, tensors) for name, tensors in zip(names, files)]
    maps = {shape: replicated_map(shape, 1) for shape in set(shapes.values())}
    places = {name: Place(maps[shape], name) for name, shape in shapes.items()}
    if len(made) == 1:
        return DiskLayout(made, places, {})
    weight_map = {name: file.name for file in made for name in file.tensors}
    size = sum(file.numbytes for file in made)
    return DiskLayout(made, places, {INDEX: {'metadata': {'total_size': size}, 'weight_map': weight_map}})


def split_layout(shapes, dtypes, degree, splits):
    """Every parameter as ``degree`` ranks hold it, under its own name; one file for each rank.

    Args:
        shapes, dtypes: by parameter name.
        degree: number of ranks.
        splits: pairs ``(pattern, axis)``; the first pattern that is found in a name says along which axis that
            parameter is cut, evenly. All others are whole on every rank.

    Raises:
        ValueError: an axis that a parameter has not, or whose size ``degree`` does not divide; a pattern that is found
            in no name.
    """
    for pattern, _ in splits:
        if not any(re.search(pattern, name) for name in shapes):
            raise ValueError(f'no parameter has {getattr(pattern, "pattern", pattern)!r} in its name, so there is '
                             'nothing to cut by it')
    maps = {}
    places = {}
    for name, shape in shapes.items():
        axis = next((axis for pattern, axis in splits if re.search(pattern, name)), None)
        if axis is not None and (not -len(shape) <= axis < len(shape) or shape[axis] % degree):
            raise ValueError(
                f'parameter {name!r} of shape {shape} cannot be cut evenly along axis {axis} over {degree} '
                'ranks. Give its true layout, by the configuration of the model or another split.')
        if (shape, axis) not in maps:
            maps[shape, axis] = replicated_map(shape, degree) if axis is None else contiguous_split_map(
                shape, [shape[axis] // degree] * degree, axis % len(shape))
        places[name] = Place(maps[shape, axis], name)
    return rank_layout(places, dtypes, degree)


def rank_layout(places, dtypes, degree):
    """Parameters under their own names at given places; one file for each of ``degree`` ranks.

    Args:
        places: name -> ``Place`` over locations 0 to ``degree - 1``. dtypes: by name.
    """
    return _by_rank(places, [{
        name: (dtypes[name], place.layout.shard_shapes[rank])
        for name, place in places.items()
    } for rank in range(degree)])


def server_disk_layout(layout, degree, dtypes):
    """Every parameter as a tensor-parallel server has it, fused; one file for each rank.

    Args:
        layout: ``ServerLayout`` over locations 0 to ``degree - 1``.
        dtypes: by Hugging Face name.

    Raises:
        ValueError: parameters that are fused into one and differ in dtype.
    """
    fused = {}
    for name, part in layout.parts.items():
        if fused.setdefault(part.parameter, dtypes[name]) != dtypes[name]:
            raise ValueError(f'{name!r} is {dtypes[name]}, but {part.parameter!r}, into which it is fused, has '
                             f'{fused[part.parameter]}. Store all in one dtype.')
    tensors = {name: (fused[name], tuple(shape)) for name, shape in layout.shard_shapes.items()}
    places = {name: Place(part.target_map, part.parameter, part.start) for name, part in layout.parts.items()}
    return _by_rank(places, [tensors] * degree)


def _by_rank(places, tensors):
    files = [
        DiskFile(f'model-tp-{rank:05d}-of-{len(tensors):05d}.safetensors', rank, held)
        for rank, held in enumerate(tensors)
    ]
    maps = dump_affine_maps({name: place.layout for name, place in places.items()})
    rows = {name: [place.tensor, place.start] for name, place in places.items() if place.tensor != name}
    index = {**maps, 'files': {file.location: file.name for file in files}, 'rows': rows}
    return DiskLayout(files, places, {MAPS: index})
