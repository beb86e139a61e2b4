# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command `ds_affine inspect`: what is in a checkpoint, as a table or as JSON."""

import json
import sys
from math import prod

from deepspeed.checkpoint.affine_adapters.checkpoints import open_checkpoint
from ds_affine.choice import is_chosen
from ds_affine.tables import show

MIB = 1 << 20


def run(options):
    """Return 0, or 2 when the checkpoint cannot be read."""
    try:
        checkpoint = open_checkpoint(options.path)
    except (ValueError, OSError) as error:
        print(f"ds_affine inspect: {error}", file=sys.stderr)
        return 2
    held = {
        name: one
        for name, one in checkpoint.parameters.items() if is_chosen(name, options.include, options.exclude)
    }
    if options.json:
        print(json.dumps(as_json(checkpoint, held), indent=1))
        return 0
    show(f"{options.path}: {checkpoint.kind}", ("parameter", "shape", "dtype", "layout", "MiB"),
         [(name, str(one.layout.logical_shape), str(
             one.dtype).removeprefix("torch."), words(one), f"{_numbytes(one) / MIB:,.2f}")
          for name, one in held.items()],
         right=1)
    total = sum(_numbytes(one) for one in held.values() if not one.tied_to)
    print(f"{len(held)} parameters and buffers, {total / MIB:,.1f} MiB without replicas")
    for name, why in checkpoint.left_out.items():
        print(f"left out: {name}: {why}")
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
    holders = [location for location, size in shards.items() if size]
    if all(shards[location] == layout.numel for location in holders):
        return "whole" if len(holders) == 1 else f"whole on {len(holders)}"
    copies = sum(shards.values()) / max(layout.numel, 1)
    pieces = sum(len(layout.pieces_by_rank.get(location, ())) for location in holders)
    return f"{pieces} pieces on {len(holders)}" + ("" if copies == 1 else f", {copies:g} copies")


def _numbytes(held):
    return held.layout.numel * held.dtype.itemsize
