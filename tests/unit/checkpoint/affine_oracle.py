# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""An element-level oracle for affine maps and transfer plans.

It shares no code with the library: it reads the public attributes of maps, pieces and segments and walks
every element with numpy. That costs time and memory in proportion to the elements, so it is for small cases only.

*Contents* is how it speaks about layouts: ``{location: int64[n]}``, for every address of a flat shard the
row-major id of the parameter's element that is stored there, or ``NOTHING`` where the map says nothing.
"""

import itertools

import numpy as np
import torch

NOTHING = -1


def count(shape):
    """Number of elements of a shape."""
    return int(np.prod(np.array(shape, dtype=object))) if len(shape) else 1


def element_grid(shape):
    """The parameter itself: an array of this shape in which every element is its own row-major id."""
    return np.arange(count(shape), dtype=np.int64).reshape(shape)


def addresses(shape, offset, strides):
    """The flat addresses that a strided view visits, in row-major order of the view."""
    assert len(shape) == len(strides), f'{len(strides)} strides for {len(shape)} axes'
    visited = np.array(offset, dtype=np.int64)
    for size, stride in zip(shape, strides):
        visited = visited[..., None] + np.arange(size, dtype=np.int64) * stride
    return visited.reshape(-1)


def piece_elements(piece):
    """Ids of the parameter's elements in a piece, in the order in which ``piece_addresses`` names their addresses."""
    return addresses(piece.shape, piece.source_offset, piece.source_strides)


def piece_addresses(piece):
    """Shard addresses of a piece."""
    return addresses(piece.shape, piece.dest_offset, piece.dest_strides)


# ---------------------------------------------------------------------------------------------- maps


def shard_element_ids(map_):
    """Contents of a map, read from its pieces; an element or address out of range or written twice is an error."""
    numel = count(map_.logical_shape)
    contents = {}
    for location, shape in map_.shard_shapes.items():
        shard = np.full(count(shape), NOTHING, dtype=np.int64)
        for piece in map_.pieces_by_rank.get(location, ()):
            elements, where = piece_elements(piece), piece_addresses(piece)
            assert _within(elements, numel), f'{piece} on {location} names elements outside {map_.logical_shape}'
            assert _within(where, len(shard)), f'{piece} on {location} names addresses outside {shape}'
            assert len(np.unique(where)) == len(where), f'{piece} on {location} stores two elements at one address'
            assert (shard[where] == NOTHING).all(), f'{piece} on {location} stores what another piece stores'
            shard[where] = elements
        contents[location] = shard
    return contents


def shard_scales(map_):
    """The factor at each shard address: ``{location: float64[n]}``, NaN where the map says nothing."""
    scales = {}
    for location, shape in map_.shard_shapes.items():
        scales[location] = np.full(count(shape), np.nan)
        for piece in map_.pieces_by_rank.get(location, ()):
            scales[location][piece_addresses(piece)] = piece.scale
    return scales


def contents_holders(numel, contents):
    """For each element of the parameter the set of locations whose shards store it."""
    holders = [set() for _ in range(numel)]
    for location, shard in contents.items():
        for element in shard[shard != NOTHING].tolist():
            holders[element].add(location)
    return holders


def element_holders(map_):
    """``contents_holders`` of a map's own contents."""
    return contents_holders(count(map_.logical_shape), shard_element_ids(map_))


def check_map(map_, contents=None, covering=True, exact=True):
    """A map keeps its promises, and stores exactly ``contents`` where these are given."""
    stored = shard_element_ids(map_)
    if exact:
        for location, shard in stored.items():
            assert (shard != NOTHING).all(), f'the pieces of {location} leave addresses unfilled'
    if contents is not None:
        assert_same_contents(stored, contents)
    holders = contents_holders(count(map_.logical_shape), stored)
    if covering:
        assert all(holders), f'nobody holds element {holders.index(set())}'
    for location, pieces in map_.pieces_by_rank.items():
        for piece in pieces:
            for element in piece_elements(piece).tolist():
                assert holders[element] == set(piece.locations), (f'{piece} on {location}: element {element} is held '
                                                                  f'by {sorted(holders[element])}')


def assert_same_contents(found, expected):
    """Both describe the same locations with the same elements at the same addresses."""
    assert set(found) == set(expected), f'locations {sorted(found)}, expected {sorted(expected)}'
    for location, shard in expected.items():
        assert np.array_equal(found[location], shard), (f'location {location} stores {found[location].tolist()}, '
                                                        f'expected {shard.tolist()}')


def is_maximally_merged(map_):
    """No two pieces of one location with equal holders and scale are together one strided block."""
    return all(not _are_one_block(one, other, map_.logical_shape) for pieces in map_.pieces_by_rank.values()
               for one, other in itertools.permutations([piece for piece in pieces if count(piece.shape)], 2))


def _are_one_block(first, second, logical_shape):
    """Whether ``second`` continues ``first`` along an axis, both in the parameter's order of axes."""
    if first.locations != second.locations or first.scale != second.scale:
        return False
    axes = range(len(logical_shape))
    corners = [np.unravel_index(piece.source_offset, logical_shape) for piece in (first, second)]
    for axis in axes:
        rest = [other for other in axes if other != axis]
        if any(first.shape[other] != second.shape[other] or corners[0][other] != corners[1][other] for other in rest):
            continue
        if corners[0][axis] + first.shape[axis] != corners[1][axis]:
            continue
        if any(first.shape[other] > 1 and first.dest_strides[other] != second.dest_strides[other] for other in rest):
            continue
        steps = {piece.dest_strides[axis] for piece in (first, second) if piece.shape[axis] > 1}
        gap = second.dest_offset - first.dest_offset
        if all(gap == first.shape[axis] * step for step in steps or {_dense_step(first, axis)}):
            return True
    return False


def _dense_step(piece, axis):
    """Where the next index of a one-index axis is stored if the block goes on without a gap; 0 if it cannot.

    A block that is one index long does not step, so any two such blocks could be called one. Which of them are is a
    free choice, except where the shard simply continues.
    """
    if any(size > 1 for size in piece.shape[:axis]):
        return 0
    step = 1
    for size, stride in zip(reversed(piece.shape[axis + 1:]), reversed(piece.dest_strides[axis + 1:])):
        if size > 1 and stride != step:
            return 0
        step *= size
    return step


# --------------------------------------------------------------------------------------------- plans


def run_plan(plan, source_contents, target_sizes):
    """Run a plan on element ids, segment by segment.

    Args:
        source_contents: contents of the source shards.
        target_sizes: ``{location: elements}`` of the target shards.

    Returns:
        ``(targets, writes)``: what arrived at each target address (NOTHING where nothing did) and how often.
    """
    targets = {location: np.full(size, NOTHING, dtype=np.int64) for location, size in target_sizes.items()}
    writes = {location: np.zeros(size, dtype=np.int64) for location, size in target_sizes.items()}
    for segment in plan.segments:
        read = addresses(segment.shape, segment.source_offset, segment.source_strides)
        written = addresses(segment.shape, segment.target_offset, segment.target_strides)
        assert segment.source_rank in source_contents, f'{segment} reads a location that does not exist'
        assert segment.target_rank in targets, f'{segment} writes a location that does not exist'
        assert _within(read, len(source_contents[segment.source_rank])), f'{segment} reads outside its shard'
        assert _within(written, len(targets[segment.target_rank])), f'{segment} writes outside its shard'
        targets[segment.target_rank][written] = source_contents[segment.source_rank][read]
        np.add.at(writes[segment.target_rank], written, 1)
    return targets, writes


def check_plan(plan, target_contents, source_contents):
    """Every target address that is part of the layout is written once with its element; no other is touched."""
    sizes = {location: len(shard) for location, shard in target_contents.items()}
    targets, writes = run_plan(plan, source_contents, sizes)
    for location, expected in target_contents.items():
        wanted = (expected != NOTHING).astype(np.int64)
        assert np.array_equal(writes[location], wanted), (f'target {location} is written {writes[location].tolist()} '
                                                          f'times, expected {wanted.tolist()}')
        assert np.array_equal(targets[location], expected), (f'target {location} received '
                                                             f'{targets[location].tolist()}, '
                                                             f'expected {expected.tolist()}')
    moved = sum(int((shard != NOTHING).sum()) for shard in target_contents.values())
    assert plan.moved_elements == moved
    assert all(count(segment.shape) > 0 for segment in plan.segments), 'a plan has no empty segments'


def run_plan_on_tensors(plan, sources, targets):
    """Move values as segments say: divide by the source's factor, multiply by the target's, cast.

    Args:
        sources, targets: ``{location: 1-D tensor}``; targets are written in place.
    """
    for segment in plan.segments:
        read = torch.from_numpy(addresses(segment.shape, segment.source_offset, segment.source_strides))
        written = torch.from_numpy(addresses(segment.shape, segment.target_offset, segment.target_strides))
        values = sources[segment.source_rank][read]
        if segment.source_scale != 1.0:
            values = values / segment.source_scale
        if segment.target_scale != 1.0:
            values = values * segment.target_scale
        targets[segment.target_rank][written] = values.to(targets[segment.target_rank].dtype)


def _within(values, size):
    return len(values) == 0 or (int(values.min()) >= 0 and int(values.max()) < size)


# --------------------------------------------------------- what constructors must yield, by slicing


def replicated_contents(shape, copies):
    """Every rank holds all."""
    return {rank: element_grid(shape).reshape(-1) for rank in range(copies)}


def split_contents(shape, sizes, dim):
    """Rank r holds the r-th slab along an axis."""
    slabs = np.split(element_grid(shape), np.cumsum(sizes)[:-1], axis=dim)
    return {rank: slab.reshape(-1) for rank, slab in enumerate(slabs)}


def sub_param_contents(shape, sub_sizes, widths, dim):
    """Sub-parameters laid end to end on an axis, each cut by its own widths; a rank concatenates its slabs."""
    subs = np.split(element_grid(shape), np.cumsum(sub_sizes)[:-1], axis=dim)
    cuts = [np.split(sub, np.cumsum(width)[:-1], axis=dim) for sub, width in zip(subs, widths)]
    return {rank: np.concatenate([cut[rank] for cut in cuts], axis=dim).reshape(-1) for rank in range(len(widths[0]))}


def segmented_contents(shape, segments, dim, ranks, split_widths):
    """Like sub-parameters, but some are held whole by every rank."""
    blocks = np.split(element_grid(shape), np.cumsum([size for size, _ in segments])[:-1], axis=dim)
    widths = iter(split_widths)
    cuts = []
    for block, (_, replicated) in zip(blocks, segments):
        cuts.append([block] * ranks if replicated else np.split(block, np.cumsum(next(widths))[:-1], axis=dim))
    return {rank: np.concatenate([cut[rank] for cut in cuts], axis=dim).reshape(-1) for rank in range(ranks)}


def block_gather_contents(shape, ids_by_rank, block_size, dim):
    """A rank concatenates the blocks it chose, in its own order."""
    contents = {}
    for rank, ids in ids_by_rank.items():
        rows = [index for block in ids for index in range(block * block_size, (block + 1) * block_size)]
        contents[rank] = np.take(element_grid(shape), rows, axis=dim).reshape(-1)
    return contents


def flat_contents(shape, bounds, locations=None):
    """A rank holds one run of the flattened parameter."""
    flat = element_grid(shape).reshape(-1)
    locations = range(len(bounds)) if locations is None else locations
    return {location: flat[start:stop] for location, (start, stop) in zip(locations, bounds)}


def zero3_contents(shape, world_size, groups=None):
    """Equal chunks of the flattened parameter, repeated in every replica group; the tail may come up short."""
    numel = count(shape)
    chunk = -(-numel // world_size)
    bounds = [(min(rank * chunk, numel), min((rank + 1) * chunk, numel)) for rank in range(world_size)]
    contents = {}
    for group in groups or [range(world_size)]:
        contents.update(flat_contents(shape, bounds, group))
    return contents
