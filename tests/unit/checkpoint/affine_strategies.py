# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Hypothesis strategies for layouts of small parameters.

A strategy yields a ``Layout``: a map made by the library, and the contents that its shards must have, made beside it
by slicing numpy arrays. Contents are explained in ``affine_oracle``.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from affine_oracle import (NOTHING, block_gather_contents, count, element_grid, flat_contents, replicated_contents,
                           segmented_contents, split_contents, sub_param_contents, zero3_contents)
from deepspeed.checkpoint.affine import (AffinePiece, ParamAffineMap, block_gather_map, compose, concat_affine_maps,
                                         contiguous_split_map, flat_partition_map, narrow, permute, relabel,
                                         replicated_map, segmented_map, sub_param_map, union_affine_maps,
                                         zero3_partition_map)


@dataclass(frozen=True)
class Layout:
    """A map, what its shards must store, and how it was made (for reading a failure)."""
    kind: str
    map: ParamAffineMap
    contents: dict

    @property
    def shape(self):
        return self.map.logical_shape

    def __repr__(self):
        pieces = {location: list(held) for location, held in self.map.pieces_by_rank.items()}
        return f'Layout({self.kind}, {self.shape}, shards={dict(self.map.shard_shapes)}, pieces={pieces})'


# -------------------------------------------------------------------------------------------- shapes

_LARGEST_SIZE = {0: 1, 1: 40, 2: 11, 3: 6, 4: 4}


@st.composite
def shapes(draw, min_axes=0, max_axes=4):
    """Small shapes; sizes of 1 are common, and now and then an axis is empty."""
    axes = draw(st.integers(min_axes, max_axes))
    shape = [draw(st.integers(1, _LARGEST_SIZE[axes])) for _ in range(axes)]
    if axes and draw(st.integers(0, 29)) == 0:
        shape[draw(st.integers(0, axes - 1))] = 0
    return tuple(shape)


def row_major(shape):
    """Strides of a dense tensor; sizes of 0 count as they are."""
    return tuple(count(shape[axis + 1:]) for axis in range(len(shape)))


@st.composite
def cuts(draw, total, parts):
    """``parts`` widths, some of them 0, that sum to ``total``."""
    edges = sorted(draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1)))
    return [high - low for low, high in zip([0, *edges], [*edges, total])]


def _axis(shape):
    return st.integers(0, len(shape) - 1)


# --------------------------------------------------------------------------- one constructor each


@st.composite
def replicated(draw, shape):
    copies = draw(st.integers(1, 3))
    return Layout('replicated', replicated_map(shape, copies), replicated_contents(shape, copies))


@st.composite
def splits(draw, shape):
    dim = draw(_axis(shape))
    sizes = draw(cuts(shape[dim], draw(st.integers(1, 5))))
    return Layout(f'split(dim={dim}, sizes={sizes})', contiguous_split_map(shape, sizes, dim),
                  split_contents(shape, sizes, dim))


@st.composite
def sub_params(draw, shape):
    dim = draw(_axis(shape))
    ranks = draw(st.integers(1, 4))
    sizes = draw(cuts(shape[dim], draw(st.integers(1, 3))))
    widths = [draw(cuts(size, ranks)) for size in sizes]
    return Layout(f'sub_param(dim={dim}, sizes={sizes}, widths={widths})', sub_param_map(shape, sizes, widths, dim),
                  sub_param_contents(shape, sizes, widths, dim))


@st.composite
def segmented(draw, shape):
    dim = draw(_axis(shape))
    ranks = draw(st.integers(1, 3))
    sizes = draw(cuts(shape[dim], draw(st.integers(1, 4))))
    segments = [(size, draw(st.booleans())) for size in sizes]
    widths = [draw(cuts(size, ranks)) for size, whole in segments if not whole]
    return Layout(f'segmented(dim={dim}, segments={segments}, widths={widths})',
                  segmented_map(shape, segments, dim, ranks, widths),
                  segmented_contents(shape, segments, dim, ranks, widths))


@st.composite
def block_gathers(draw, shape):
    dim = draw(_axis(shape))
    size = draw(st.sampled_from([width for width in range(1, max(shape[dim], 1) + 1) if shape[dim] % width == 0]))
    blocks = draw(st.permutations(range(shape[dim] // size)))
    widths = draw(cuts(len(blocks), draw(st.integers(1, 3))))
    edges = np.cumsum([0, *widths])
    ids = {rank: list(blocks[low:high]) for rank, (low, high) in enumerate(zip(edges[:-1], edges[1:]))}
    return Layout(f'block_gather(dim={dim}, ids={ids}, size={size})', block_gather_map(shape, ids, size, dim),
                  block_gather_contents(shape, ids, size, dim))


@st.composite
def zero3(draw, shape):
    ranks = draw(st.integers(1, 7))
    groups = draw(st.sampled_from([None, None, 'ids', 'groups']))
    if groups is None:
        return Layout(f'zero3({ranks})', zero3_partition_map(shape, ranks), zero3_contents(shape, ranks))
    ids = draw(st.permutations(range(2 * ranks)))
    if groups == 'ids':
        return Layout(f'zero3({ranks}, {ids[:ranks]})', zero3_partition_map(shape, ranks, locations=ids[:ranks]),
                      zero3_contents(shape, ranks, [ids[:ranks]]))
    groups = [ids[:ranks], ids[ranks:]]
    return Layout(f'zero3({ranks}, {groups})', zero3_partition_map(shape, ranks, locations=groups),
                  zero3_contents(shape, ranks, groups))


@st.composite
def flat_partitions(draw, shape):
    widths = draw(cuts(count(shape), draw(st.integers(1, 5))))
    edges = np.cumsum([0, *widths]).tolist()
    bounds = list(zip(edges[:-1], edges[1:]))
    ids = draw(st.none() | st.permutations(range(len(bounds))))
    return Layout(f'flat({bounds}, {ids})', flat_partition_map(shape, bounds, locations=ids),
                  flat_contents(shape, bounds, ids))


# ---------------------------------------------------------------------------- pieces written by hand


def _slab_slices(shape, widths, dim):
    """Origins and extents of the slabs of a split."""
    start = 0
    for width in widths:
        origin, extent = [0] * len(shape), list(shape)
        origin[dim], extent[dim] = start, width
        start += width
        yield tuple(origin), tuple(extent)


def _take(shape, origin, extent):
    """The elements of a box, as an array of the box's shape."""
    return element_grid(shape)[tuple(slice(low, low + size) for low, size in zip(origin, extent))]


def _flat_origin(shape, origin):
    return sum(low * stride for low, stride in zip(origin, row_major(shape)))


def _stored_box(shape, origin, extent, order, dest_offset, holders, axes_as_stored):
    """A piece that stores a box with its axes in ``order``, densely packed from ``dest_offset`` on.

    The same piece can be written in the parameter's order of axes (then its dest strides are permuted) or in the
    shard's (then its source strides are).
    """
    packed = row_major([extent[axis] for axis in order])
    dest = [0] * len(shape)
    for axis, stride in zip(order, packed):
        dest[axis] = stride
    source = row_major(shape)
    view = order if axes_as_stored else range(len(shape))
    return AffinePiece([extent[axis] for axis in view], _flat_origin(shape, origin), [source[axis] for axis in view],
                       dest_offset, [dest[axis] for axis in view], holders)


@st.composite
def transposed_shards(draw, shape):
    """A split whose shards hold their slabs with the axes in another order."""
    dim = draw(_axis(shape))
    order = draw(st.permutations(range(len(shape))))
    as_stored = draw(st.booleans())
    widths = draw(cuts(shape[dim], draw(st.integers(1, 3))))
    shard_shapes, pieces, contents = {}, {}, {}
    for rank, (origin, extent) in enumerate(_slab_slices(shape, widths, dim)):
        shard_shapes[rank] = tuple(extent[axis] for axis in order)
        pieces[rank] = [_stored_box(shape, origin, extent, order, 0, [rank], as_stored)]
        contents[rank] = _take(shape, origin, extent).transpose(order).reshape(-1)
    return Layout(f'transposed(dim={dim}, widths={widths}, order={order})',
                  ParamAffineMap(shape, shard_shapes, pieces), contents)


@st.composite
def partially_replicated(draw, shape):
    """Slabs along an axis, each held by some of the ranks, each rank storing its slabs in an order of its own."""
    dim = draw(_axis(shape))
    ranks = draw(st.integers(1, 3))
    widths = draw(cuts(shape[dim], draw(st.integers(1, 4))))
    slabs = list(_slab_slices(shape, widths, dim))
    holders = [draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in slabs]
    shard_shapes, pieces, contents = {}, {}, {}
    for rank in range(ranks):
        mine = draw(st.permutations([index for index, held in enumerate(holders) if rank in held]))
        shard_shape = list(shape)
        shard_shape[dim] = sum(widths[index] for index in mine)
        strides = row_major(shard_shape)
        start, pieces[rank] = 0, []
        for index in mine:
            origin, extent = slabs[index]
            pieces[rank].append(
                AffinePiece(extent, _flat_origin(shape, origin), row_major(shape), start * strides[dim], strides,
                            holders[index]))
            start += widths[index]
        held = [_take(shape, *slabs[index]) for index in mine]
        contents[rank] = np.concatenate(held, axis=dim).reshape(-1) if held else np.zeros(0, np.int64)
        shard_shapes[rank] = tuple(shard_shape)
    return Layout(f'partially_replicated(dim={dim}, widths={widths}, holders={holders})',
                  ParamAffineMap(shape, shard_shapes, pieces), contents)


@st.composite
def box_partitions(draw, shape, scales=st.just(1.0)):
    """The parameter cut into boxes at random; ranks store their boxes packed one after the other in a flat shard."""
    boxes = [(tuple([0] * len(shape)), tuple(shape))]
    for _ in range(draw(st.integers(0, 4))):
        origin, extent = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(_axis(shape))
        first, second = draw(cuts(extent[axis], 2))
        boxes.append((origin, _with(extent, axis, first)))
        boxes.append((_with(origin, axis, origin[axis] + first), _with(extent, axis, second)))
    ranks = draw(st.integers(1, 3))
    pieces, stored = {rank: [] for rank in range(ranks)}, {rank: [] for rank in range(ranks)}
    filled = {rank: 0 for rank in range(ranks)}
    for origin, extent in draw(st.permutations(boxes)):
        holders = draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=2))
        for rank in sorted(holders):
            order = draw(st.permutations(range(len(shape))))
            piece = _stored_box(shape, origin, extent, order, filled[rank], holders, draw(st.booleans()))
            pieces[rank].append(_rescaled(piece, draw(scales)))
            stored[rank].append(_take(shape, origin, extent).transpose(order).reshape(-1))
            filled[rank] += count(extent)
    contents = {rank: np.concatenate([np.zeros(0, np.int64), *held]) for rank, held in stored.items()}
    return Layout('boxes', ParamAffineMap(shape, {rank: (size, ) for rank, size in filled.items()}, pieces), contents)


def _with(values, axis, value):
    return (*values[:axis], value, *values[axis + 1:])


def _rescaled(piece, scale):
    return AffinePiece(piece.shape, piece.source_offset, piece.source_strides, piece.dest_offset, piece.dest_strides,
                       piece.locations, scale)


@st.composite
def unequal_replicas(draw, shape):
    """Slabs with two holders each, one of which stores its slab whole and the other in two halves."""
    dim, cut_axis = draw(_axis(shape)), draw(_axis(shape))
    widths = draw(cuts(shape[dim], draw(st.integers(1, 3))))
    shard_shapes, pieces, contents = {}, {}, {}
    for index, (origin, extent) in enumerate(_slab_slices(shape, widths, dim)):
        holders = (2 * index, 2 * index + 1)
        strides = row_major(extent)
        halves, start = [], 0
        for width in draw(cuts(extent[cut_axis], 2)):
            low = _with(origin, cut_axis, origin[cut_axis] + start)
            halves.append(
                AffinePiece(_with(extent, cut_axis, width), _flat_origin(shape, low), row_major(shape),
                            start * strides[cut_axis], strides, holders))
            start += width
        whole = AffinePiece(extent, _flat_origin(shape, origin), row_major(shape), 0, strides, holders)
        for holder, held in zip(holders, ([whole], halves)):
            shard_shapes[holder], pieces[holder] = extent, held
            contents[holder] = _take(shape, origin, extent).reshape(-1)
    return Layout(f'unequal_replicas(dim={dim}, widths={widths}, cut={cut_axis})',
                  ParamAffineMap(shape, shard_shapes, pieces), contents)


# ------------------------------------------------------------------------------- layouts of layouts


def renumbered(contents, ids):
    """Contents in which element e is called ``ids[e]``."""
    return {
        location: np.where(shard == NOTHING, NOTHING,
                           np.append(ids, NOTHING)[shard])
        for location, shard in contents.items()
    }


def relabelled(layout, ids):
    """The same layout at other locations."""
    return Layout(layout.kind, relabel(layout.map, ids), {ids[old]: shard for old, shard in layout.contents.items()})


@st.composite
def apart(draw, layouts):
    """Layouts moved to disjoint location ids, in no particular order."""
    moved = []
    for index, layout in enumerate(layouts):
        olds = sorted(layout.contents)
        news = draw(st.permutations([100 * index + place for place in range(len(olds))]))
        moved.append(relabelled(layout, dict(zip(olds, news))))
    return moved


def surviving(layout, keep):
    """What is left of a layout when only some of its locations are."""
    pieces = {
        location: [
            AffinePiece(piece.shape, piece.source_offset, piece.source_strides, piece.dest_offset, piece.dest_strides,
                        piece.locations & set(keep), piece.scale)
            for piece in layout.map.pieces_by_rank.get(location, ())
        ]
        for location in keep
    }
    shards = {location: layout.map.shard_shapes[location] for location in keep}
    return Layout(f'surviving {sorted(keep)} of {layout.kind}', ParamAffineMap(layout.shape, shards, pieces),
                  {location: layout.contents[location]
                   for location in keep})


def union_of(layouts):
    """Layouts of the same parameter, at disjoint locations, held at once."""
    contents = {location: shard for layout in layouts for location, shard in layout.contents.items()}
    return Layout(f'union({", ".join(layout.kind for layout in layouts)})',
                  union_affine_maps([layout.map for layout in layouts]), contents)


def concatenation_of(layouts, dim):
    """Layouts of the parts of a parameter, at disjoint locations, seen as layouts of the whole."""
    total = list(layouts[0].shape)
    total[dim] = sum(layout.shape[dim] for layout in layouts)
    edges = np.cumsum([layout.shape[dim] for layout in layouts])[:-1]
    contents = {}
    for layout, part in zip(layouts, np.split(element_grid(total), edges, axis=dim)):
        contents.update(renumbered(layout.contents, part.reshape(-1)))
    return Layout(f'concat(dim={dim}, {", ".join(layout.kind for layout in layouts)})',
                  concat_affine_maps([layout.map for layout in layouts], dim), contents)


def permuted(layout, dims):
    """The same shards, seen as a layout of the parameter with its axes permuted."""
    olds = element_grid(layout.shape).transpose(dims).reshape(-1)
    return Layout(f'permute({dims}, {layout.kind})', permute(layout.map, dims),
                  renumbered(layout.contents, np.argsort(olds)))


def narrowed(layout, dim, start, length):
    """The same shards, seen as holding a slab of the parameter and other things besides."""
    slab = np.take(element_grid(layout.shape), range(start, start + length), axis=dim).reshape(-1)
    ids = np.full(count(layout.shape), NOTHING, np.int64)
    ids[slab] = np.arange(len(slab))
    return Layout(f'narrow({dim}, {start}, {length}, {layout.kind})', narrow(layout.map, dim, start, length),
                  renumbered(layout.contents, ids))


def composition_of(outer, inners):
    """A layout of the shards of a layout."""
    contents = {}
    for location, inner in inners.items():
        contents.update({held: outer.contents[location][shard] for held, shard in inner.contents.items()})
    kinds = ', '.join(f'{location}: {inner.kind}' for location, inner in inners.items())
    return Layout(f'compose({outer.kind}, {kinds})',
                  compose(outer.map, {
                      location: inner.map
                      for location, inner in inners.items()
                  }), contents)


def reshaped_shards(layout, reshape):
    """The same shards, whose tensors have other axes."""
    shards = {location: reshape(shape) for location, shape in layout.map.shard_shapes.items()}
    return Layout(f'reshaped {layout.kind}', ParamAffineMap(layout.shape, shards, layout.map.pieces_by_rank),
                  layout.contents)


# ------------------------------------------------------------------------------------- collections

_FLAT = (zero3, flat_partitions)
_SPLIT = (splits, sub_params, segmented, block_gathers)
_HAND_MADE = (transposed_shards, partially_replicated, box_partitions, unequal_replicas)


def constructor_layouts(shape):
    """Layouts as the constructors make them."""
    kinds = (replicated, *_FLAT, *(_SPLIT if shape else ()))
    return st.one_of([kind(shape) for kind in kinds])


def flat_layouts(shape):
    return st.one_of([kind(shape) for kind in _FLAT])


def block_layouts(shape):
    """Layouts whose shards hold blocks; none is flat."""
    kinds = (replicated, *((*_SPLIT, *_HAND_MADE) if shape else ()))
    return st.one_of([kind(shape) for kind in kinds])


def simple_layouts(shape):
    """Layouts that cover their parameter and fill their shards; none is made of other layouts."""
    return flat_layouts(shape) | block_layouts(shape)


@st.composite
def unions(draw, shape, members=st.integers(2, 3)):
    """Two or three layouts at once; all but one may have lost locations."""
    kinds = simple_layouts(shape) | compositions(shape)
    if shape:
        kinds |= concatenations(shape) | permutations_of_layouts(shape)
    layouts = [draw(kinds) for _ in range(draw(members))]
    layouts[1:] = [surviving(layout, draw(_some(sorted(layout.contents)))) for layout in layouts[1:]]
    return union_of(draw(st.permutations(draw(apart(layouts)))))


def _some(values):
    return st.sets(st.sampled_from(values), min_size=1)


@st.composite
def concatenations(draw, shape, parts=st.integers(1, 3)):
    """Separately held parts of a parameter."""
    dim = draw(_axis(shape))
    layouts = []
    for width in draw(cuts(shape[dim], draw(parts))):
        layouts.append(draw(simple_layouts(_with(shape, dim, width))))
    return concatenation_of(draw(apart(layouts)), dim)


@st.composite
def permutations_of_layouts(draw, shape):
    """A layout of the permuted parameter, permuted back."""
    dims = draw(st.permutations(range(len(shape))))
    before = [0] * len(shape)
    for axis, dim in enumerate(dims):
        before[dim] = shape[axis]
    return permuted(draw(simple_layouts(tuple(before))), dims)


@st.composite
def compositions(draw, shape):
    """Layouts of the shards of a layout: ZeRO-3 on top of tensor parallelism, for example."""
    outers = [replicated, *_FLAT, *((*_SPLIT, *_HAND_MADE) if shape else ())]
    outer = draw(st.one_of([kind(shape) for kind in outers]))
    locations = sorted(outer.contents)
    inners = [draw(simple_layouts(outer.map.shard_shapes[location])) for location in locations]
    return composition_of(outer, dict(zip(locations, draw(apart(inners)))))


@st.composite
def reshaped(draw, shape):
    layout = draw(simple_layouts(shape))
    return reshaped_shards(layout, draw(st.sampled_from([lambda held: (count(held), ), lambda held: (1, *held, 1)])))


def derived_layouts(shape):
    """Layouts made of other layouts."""
    kinds = (unions, compositions, reshaped, *((concatenations, permutations_of_layouts) if shape else ()))
    return st.one_of([kind(shape) for kind in kinds])


def layouts(shape):
    """Everything that must plan, as a source and as a target."""
    return simple_layouts(shape) | derived_layouts(shape)


@st.composite
def narrowings(draw, shape):
    """Layouts of a larger parameter whose slab this parameter is: legal as a source only."""
    dim = draw(_axis(shape))
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    larger = _with(shape, dim, before + shape[dim] + after)
    return narrowed(draw(simple_layouts(larger)), dim, before, shape[dim])


@st.composite
def scaled_layouts(draw, shape, scales):
    """Layouts whose pieces carry factors."""
    if not shape or draw(st.booleans()):
        scale, copies = draw(scales), draw(st.integers(1, 3))
        return Layout(f'replicated(scale={scale})', replicated_map(shape, copies, scale),
                      replicated_contents(shape, copies))
    return draw(box_partitions(shape, scales))
