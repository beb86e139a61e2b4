# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where ZeRO's rank files keep each parameter. Checked against checkpoints that DeepSpeed 0.19.8 saves."""

from itertools import accumulate
from math import prod

from deepspeed.checkpoint.affine.checks import listed
from deepspeed.checkpoint.affine.partitions import flat_partition_map, zero3_partition_map
from deepspeed.checkpoint.affine_adapters.held import HeldParameter
from deepspeed.checkpoint.affine_adapters.stored import CheckpointError


def zero3_trained(shapes, states, paths, copies):
    """Master weights of ZeRO-3: partitions follow one another in the flat groups, in the order of the shapes.

    Args:
        shapes: name -> shape, in the order of ``param_shapes``.
        states: optimizer states of all data-parallel ranks. paths: their files.
        copies: name -> number of ranks, for parameters that are cut over fewer than all; those are left out.

    Returns:
        ``{name: HeldParameter}``, over locations 0 to ``len(states) - 1``.

    Raises:
        CheckpointError: flat groups whose sizes do not fit the shapes or one another.
    """
    flats = zero3_flats(states, paths)
    held, layouts = {}, {}
    places = zero3_places(shapes, copies, [len(flat) for flat in flats[0]], len(states), paths[0])
    for name, (number, start) in places.items():
        shape = shapes[name]
        if name in copies:
            continue
        if shape not in layouts:
            layouts[shape] = zero3_partition_map(shape, len(states))
        held[name] = _zero3_held(layouts[shape], [groups[number][start:] for groups in flats])
    return held


def zero3_flats(states, paths):
    """The flat groups of each rank, in a list for each. Arguments and errors as for ``zero3_trained``."""
    flats = [state.get('fp32_flat_groups') for state in states]
    for path, groups in zip(paths, flats):
        if not isinstance(groups, list) or [len(flat) for flat in groups] != [len(flat) for flat in flats[0]]:
            raise CheckpointError(f'{path}: its flat groups have other sizes than those of {paths[0].name}.')
    return [[flat.detach() for flat in groups] for groups in flats]


def zero3_places(shapes, copies, sizes, world_size, path):
    """``{name: (group, first element)}`` of a rank's parameters that have elements.

    Args:
        sizes: elements of its flat groups. path: of their file. Others as for ``zero3_trained``.
    """
    places, number, start = {}, 0, 0
    for name, shape in shapes.items():
        count = -(-prod(shape) // copies.get(name, world_size))
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
    if number < len(sizes) - 1 or sizes and start != sizes[-1]:
        raise CheckpointError(f'{path}: its flat groups of {listed(sizes)} elements have more than the parameters of '
                              'param_shapes take.')
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
        held[name] = _zero3_held(layout, [fragment.detach().flatten() for fragment in fragments])
    return held


def _zero3_held(layout, buffers):
    """Without what pads the last partitions."""
    own = {rank: buffer[:prod(layout.shard_shapes[rank])] for rank, buffer in enumerate(buffers)}
    return HeldParameter(layout, own, buffers[0].dtype)


def flat_trained(shapes, states, paths):
    """Master weights of ZeRO-1 and 2: one flat buffer is cut anywhere, and each rank says which elements of its part
    are whose. Arguments and result as for ``zero3_trained``; a location is there only where it holds something."""
    pieces = flat_pieces(states, paths)
    return {name: laid_flat(name, shape, pieces.get(name, []), paths) for name, shape in shapes.items() if prod(shape)}


def flat_pieces(states, paths):
    """``{name: [(rank, elements)]}`` of what each rank's part of the flat buffers has of a parameter."""
    pieces = {}
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
                pieces.setdefault(name, []).append((rank, flat.detach().narrow(0, fragment.start, fragment.numel)))
    return pieces


def laid_flat(name, shape, pieces, paths):
    """A parameter of which each rank of ``pieces`` has the elements that follow those of the rank before."""
    stops = list(accumulate(len(piece) for _, piece in pieces))
    if not stops or stops[-1] != prod(shape):
        raise CheckpointError(f'{paths[0].parent}: all ranks have {stops[-1] if stops else 0} elements of parameter '
                              f'{name!r} of shape {shape} between them.')
    layout = flat_partition_map(shape, list(zip([0, *stops], stops)), locations=[rank for rank, _ in pieces])
    return HeldParameter(layout, dict(pieces), pieces[0][1].dtype)
