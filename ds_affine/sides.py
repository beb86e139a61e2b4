# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The two layouts that a plan goes between, as the command line names them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Sequence

import torch

from deepspeed.checkpoint.affine.checks import sizes
from deepspeed.checkpoint.affine.constructors import contiguous_split_map, replicated_map
from deepspeed.checkpoint.affine.envelope import load_affine_maps
from deepspeed.checkpoint.affine.param_map import ParamAffineMap
from deepspeed.checkpoint.affine.partitions import zero3_partition_map
from deepspeed.checkpoint.affine_adapters.checkpoints import open_checkpoint
from deepspeed.checkpoint.affine_adapters.safetensors_files import envelope_of, read_json
from deepspeed.checkpoint.affine_transfer import ParameterTransfer, TransferEndpoints, plan_transfers


@dataclass(frozen=True)
class Sides:
    """Maps of both sides, for the same names, and the dtype of elements; and names that one side alone has."""
    source: Dict[str, ParamAffineMap]
    target: Dict[str, ParamAffineMap]
    dtype: torch.dtype
    only_in_source: Sequence[str] = ()
    only_in_target: Sequence[str] = ()

    def plan(self, together):
        """The `ModelPlan`. Location l of the source is process l; that of the target too where they are `together`,
        else it comes after all processes of the source."""
        ends = [sorted({location for one in maps.values() for location in one.shard_shapes})
                for maps in (self.source, self.target)]  # yapf: disable
        first = 0 if together else max(ends[0], default=-1) + 1
        endpoints = TransferEndpoints({at: at for at in ends[0]}, {at: at + first for at in ends[1]})
        return plan_transfers(
            {
                name: ParameterTransfer(target, self.source[name], self.dtype)
                for name, target in self.target.items()
            },
            endpoints=endpoints)


def read_sides(source, target, dtype):
    """Both sides, from words such as `zero3-64`, folders of checkpoints, files of maps or tables of shapes.

    Raises:
        ValueError: one that is neither, two that name no shapes, or no name that both have.
    """
    sides = [_read(text) for text in (source, target)]
    shapes = next((shapes for shapes, _ in sides if shapes), None)
    if shapes is None:
        raise ValueError(
            f'{source} and {target} name no parameters; one of them must be a checkpoint, a file of maps, '
            'or LAYOUT:FILE with a table of shapes, such as zero3-64:model.json')
    made = [maps(shapes) for _, maps in sides]
    names = {name: None for name in made[1] if name in made[0]}
    if not names:
        raise ValueError(f'{source} and {target} have no parameter of the same name')
    both = ({name: one[name] for name in names} for one in made)
    return Sides(*both, dtype, *([name for name in one if name not in names] for one in made))


def _read(text):
    """Shapes by name where the side has them, else None; and a function from shapes to maps."""
    word, _, table = text.partition(':')
    match = re.fullmatch(r'(zero3|whole|rows|columns)-([1-9]\d*)', word)
    if match:
        kind, ranks = match[1], int(match[2])

        def maps(shapes):
            made = {shape: _map(kind, shape, ranks) for shape in set(shapes.values())}
            return {name: made[shape] for name, shape in shapes.items()}

        return _table(Path(table)) if table else None, maps
    path = Path(text)
    if path.is_dir():
        held = {name: one.layout for name, one in open_checkpoint(path).parameters.items() if not one.tied_to}
    elif path.is_file():
        held = _maps_in(path)
    else:
        raise ValueError(f'{text!r} is no layout (zero3-N, whole-N, rows-N, columns-N), no checkpoint and no file')
    return {name: one.logical_shape for name, one in held.items()}, lambda shapes: held


def _maps_in(path):
    content = read_json(path)
    if 'parameters' in content and 'params' not in content:
        raise ValueError(f'{path}: is a table of shapes; say in which layout, such as zero3-8:{path}')
    if 'logical_shape' in content:
        raise ValueError(f'{path}: is one map without a name; expected {{"version": 1, "params": {{name: map}}}}')
    try:
        return load_affine_maps(envelope_of(content))
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from error


def _map(kind, shape, ranks):
    if kind == 'zero3':
        return zero3_partition_map(shape, ranks)
    axis = {'rows': 0, 'columns': len(shape) - 1}.get(kind)
    # Vectors are whole on every rank, as with tensor parallelism.
    if axis is None or len(shape) < 2:
        return replicated_map(shape, ranks)
    share, rest = divmod(shape[axis], ranks)
    return contiguous_split_map(shape, [share + (rank < rest) for rank in range(ranks)], axis)


def _table(path):
    parameters = read_json(path).get('parameters')
    if not isinstance(parameters, dict):
        raise ValueError(f'{path}: has no "parameters", names with their shapes')
    try:
        return {name: sizes(shape, f'the shape of {name!r}') for name, shape in parameters.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f'{path}: {error}') from error
