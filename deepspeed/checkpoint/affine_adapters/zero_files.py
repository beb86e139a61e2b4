# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where ZeRO's rank files keep each parameter. Checked against checkpoints that DeepSpeed 0.19.8 saves."""

from itertools import accumulate
from math import prod

from deepspeed.checkpoint.affine.checks import listed
from deepspeed.checkpoint.affine.partitions import flat_partition_map, zero3_partition_map
from deepspeed.checkpoint.affine_adapters.held import HeldParameter
from deepspeed.checkpoint.affine_adapters.stored import CheckpointError


def zero3_trained(shapes, states, paths):
    """Master weights of ZeRO-3: partitions follow one another in the flat groups, in the order of the shapes.

    Args:
        shapes: name -> shape, in the order of ``param_shapes``.
        states: optimizer states of all data-parallel ranks. paths: their files.

    Returns:
        ``{name: HeldParameter}``, over locations 0 to ``len(states) - 1``.

    Raises:
        CheckpointError: flat groups whose sizes do not fit the shapes or one another.
    """
    groups = [state.get('fp32_flat_groups') for state in states]
    for path, flats in zip(paths, groups):
        if not isinstance(flats, list) or [len(flat) for flat in flats] != [len(flat) for flat in groups[0]]:
            raise CheckpointError(f'{path}: its flat groups have other sizes than those of {paths[0].name}.')
    held, layouts, places = {}, {}, _places(shapes, [len(flat) for flat in groups[0]], len(states), paths[0])
    for name, (number, start) in places.items():
        shape = shapes[name]
        if shape not in layouts:
            layouts[shape] = zero3_partition_map(shape, len(states))
        held[name] = _zero3_held(layouts[shape], [flats[number][start:] for flats in groups])
    return held


def _places(shapes, sizes, world_size, path):
    """``{name: (group, first element)}`` of parameters that have elements."""
    places, number, start = {}, 0, 0
    for name, shape in shapes.items():
        count = -(-prod(shape) // world_size)
        if not count:
            continue
        # A group is a number of whole partitions.
        while number < len(sizes) and start == sizes[number]:
            number, start = number + 1, 0
        if number == len(sizes) or start + count > sizes[number]:
            raise CheckpointError(f'{path}: parameter {name!r} of shape {shape} is not in its flat groups of '
                                  f'{listed(sizes)} elements.')
        places[name] = number, start
        start += count
    return places


def zero3_frozen(shapes, models, paths):
    """Frozen parameters of ZeRO-3, of which every rank's model states have a partition. Arguments and result as for
    ``zero3_trained``."""
    held = {}
    for name, shape in shapes.items():
        fragments = [(model.get('frozen_param_fragments') or {}).get(name) for model in models]
        layout = zero3_partition_map(tuple(shape), len(models))
        for path, fragment, needed in zip(paths, fragments, layout.shard_shapes.values()):
            if fragment is None or not fragment.is_contiguous() or fragment.numel() < prod(needed):
                raise CheckpointError(f'{path}: has not the {prod(needed)} elements of frozen parameter {name!r} that '
                                      'are its part.')
        held[name] = _zero3_held(layout, [fragment.flatten() for fragment in fragments])
    return held


def _zero3_held(layout, buffers):
    """Without what pads the last partitions."""
    own = {rank: buffer[:prod(layout.shard_shapes[rank])] for rank, buffer in enumerate(buffers)}
    return HeldParameter(layout, own, buffers[0].dtype)


def flat_trained(shapes, states, paths):
    """Master weights of ZeRO-1 and 2: one flat buffer is cut anywhere, and each rank says which elements of its part
    are whose. Arguments and result as for ``zero3_trained``; a location is there only where it holds something."""
    parts = {}
    for rank, (state, path) in enumerate(zip(states, paths)):
        flats, slices = state.get('single_partition_of_fp32_groups'), state.get('param_slice_mappings')
        if not isinstance(flats, list) or not isinstance(slices, list) or len(flats) != len(slices):
            raise CheckpointError(f'{path}: does not say in param_slice_mappings which elements of its partition are '
                                  'whose. Its DeepSpeed is too old, or it is no file of ZeRO-1 or 2.')
        for flat, fragments in zip(flats, slices):
            for name, fragment in fragments.items():
                if not 0 <= fragment.start <= fragment.start + fragment.numel <= len(flat):
                    raise CheckpointError(f'{path}: parameter {name!r} is said to lie at [{fragment.start}, '
                                          f'{fragment.start + fragment.numel}) of {len(flat)} elements.')
                parts.setdefault(name, []).append((rank, flat.narrow(0, fragment.start, fragment.numel)))
    return {name: _of_parts(name, shape, parts.get(name, []), paths) for name, shape in shapes.items() if prod(shape)}


def _of_parts(name, shape, parts, paths):
    stops = list(accumulate(len(part) for _, part in parts))
    if not stops or stops[-1] != prod(shape):
        raise CheckpointError(f'{paths[0].parent}: all ranks have {stops[-1] if stops else 0} elements of parameter '
                              f'{name!r} of shape {shape} between them.')
    layout = flat_partition_map(shape, list(zip([0, *stops], stops)), locations=[rank for rank, _ in parts])
    return HeldParameter(layout, dict(parts), parts[0][1].dtype)
