# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command `ds_affine explain`: why a parameter goes where it goes."""

import sys
from pathlib import Path

import torch

from ds_affine.page import page
from ds_affine.sides import read_sides
from ds_affine.tables import show

MOST_ROWS = 50
PIECES = ("location", "shape", "first", "strides", "held by")
COPIES = ("from", "at", "to", "at", "shape", "chosen of")


def run(options):
    """Return 0, or 2 when there is no such parameter or no plan."""
    try:
        sides = read_sides(options.source, options.target, getattr(torch, options.dtype))
        if options.name not in sides.target:
            near = [name for name in sides.target if options.name in name][:3]
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(f"no parameter {options.name!r} is in both layouts{hint}")
        plan = sides.plan(options.same_processes)
        if options.html:
            Path(options.html).write_text(page(options.name, sides, plan), encoding="utf-8")
            return 0
    except (ValueError, OSError) as error:
        print(f"ds_affine explain: {error}", file=sys.stderr)
        return 2
    name = options.name
    print(f"{name}, shape {sides.target[name].logical_shape}")
    for side, layout in (("source", sides.source[name]), ("target", sides.target[name])):
        _show(f"\n{side}: elements of the parameter, and who has them", PIECES, piece_rows(layout))
    _show("\ncopies: from which holder each target takes its elements", COPIES,
          copy_rows(plan[name], sides.source[name]))
    return 0


def _show(title, columns, rows):
    show(title, columns, rows[:MOST_ROWS])
    if len(rows) > MOST_ROWS:
        print(f"... and {len(rows) - MOST_ROWS:,} more")


def piece_rows(layout):
    """One row for each piece of a map: its shape, and first address and strides in the whole parameter."""
    return [(str(location), str(piece.shape), str(piece.source_offset), str(piece.source_strides),
             holders(piece.locations)) for location in layout.shard_shapes
            for piece in layout.pieces_by_rank.get(location, ())]


def copy_rows(plan, source):
    """One row for each segment of a plan, with the locations that hold its first element too."""
    rows = []
    for segment in plan.segments:
        held = next(
            (piece.locations
             for piece in source.pieces_by_rank[segment.source_rank] if has_address(piece, segment.source_offset)),
            {segment.source_rank})
        rows.append((str(segment.source_rank), str(segment.source_offset), str(segment.target_rank),
                     str(segment.target_offset), str(segment.shape), holders(held)))
    return rows


def has_address(piece, address):
    """Whether an address of the shard is one of this piece's, whose strides nest."""
    rest = address - piece.dest_offset
    for stride, size in sorted(zip(piece.dest_strides, piece.shape), reverse=True):
        if size > 1 and rest >= 0:
            rest -= min(rest // stride, size - 1) * stride
    return rest == 0


def holders(locations):
    """Some location ids in a few words."""
    ids = sorted(locations)
    return ", ".join(map(str, ids[:4])) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
