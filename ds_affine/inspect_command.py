# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command `ds_affine inspect`: what is in a checkpoint, as a table or as JSON."""

import json
from itertools import zip_longest
from math import prod

from deepspeed.checkpoint.affine_adapters.checkpoints import open_checkpoint
from ds_affine.choice import is_chosen
from ds_affine.tables import plain, show, size


def run(options):
    """Return 0."""
    checkpoint = open_checkpoint(options.path)
    held = {
        name: one
        for name, one in checkpoint.parameters.items() if is_chosen(name, options.include, options.exclude)
    }
    if options.json:
        print(json.dumps(as_json(checkpoint, held), indent=1))
        return 0
    show(
        f"{options.path}: {checkpoint.kind}", ("parameter", "shape", "dtype", "layout", "size"),
        [(name, str(one.layout.logical_shape), str(one.dtype).removeprefix("torch."), words(one), size(_numbytes(one)))
         for name, one in held.items()],
        right=1)
    total = sum(_numbytes(one) for one in held.values() if not one.tied_to)
    print(f"{len(held)} parameters and buffers, {size(total)} without replicas")
    for name, why in checkpoint.left_out.items():
        print(f"left out: {plain(name)}: {why}")
    return 0


def as_json(checkpoint, held):
    """Everything, in plain lists, dicts and numbers."""
    return {
        "kind": checkpoint.kind,
        "left_out": checkpoint.left_out,
        "parameters": {
            name: {
                "shape": list(one.layout.logical_shape),
                "dtype": str(one.dtype).removeprefix("torch."),
                "tied_to": one.tied_to,
                "map": one.layout.to_dict()
            }
            for name, one in held.items()
        }
    }


def words(held):
    """A layout in a few words."""
    if held.tied_to:
        return f"tied to {held.tied_to}"
    layout = held.layout
    shards = {location: prod(shape) for location, shape in layout.shard_shapes.items()}
    holders = [location for location, numel in shards.items() if numel]
    if not holders:
        return "empty"
    if all(shards[location] == layout.numel for location in holders):
        return "whole" if len(holders) == 1 else f"whole on {len(holders)}"
    if (axis := _split_axis(layout, holders)) is not None:
        return f"cut along axis {axis} over {len(holders)}"
    if layout.shard_shapes[holders[0]] != layout.logical_shape and _is_flat(layout, holders):
        return f"flat over {len(holders)}"
    copies = sum(shards.values()) / max(layout.numel, 1)
    pieces = sum(len(layout.pieces_by_rank.get(location, ())) for location in holders)
    return f"{pieces} pieces on {len(holders)}" + ("" if copies == 1 else f", {copies:g} copies")


def _split_axis(layout, holders):
    """The axis along which every holder has one range, each another one; None where it is not like that."""
    pieces = [layout.pieces_by_rank[location] for location in holders]
    if any(
            len(own) != 1 or len(own[0].locations) != 1 or own[0].shape != layout.shard_shapes[location]
            for own, location in zip(pieces, holders)):
        return None
    cut = {
        axis
        for (piece, ) in pieces
        for axis, (width, whole) in enumerate(zip_longest(piece.shape, layout.logical_shape)) if width != whole
    }
    return cut.pop() if len(cut) == 1 and len(pieces[0][0].shape) == len(layout.logical_shape) else None


def _is_flat(layout, holders):
    """Whether every holder has elements that follow one another, each other ones."""
    if any(len(layout.shard_shapes[location]) != 1 for location in holders):
        return False
    pieces = [piece for location in holders for piece in layout.pieces_by_rank[location]]
    return all(len(piece.locations) == 1 for piece in pieces) and sum(piece.numel for piece in pieces) == layout.numel


def _numbytes(held):
    return held.layout.numel * held.dtype.itemsize
