# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command `ds_affine explain`: why a parameter goes where it goes."""

import os
from difflib import get_close_matches
from itertools import islice
from math import prod
from pathlib import Path
from uuid import uuid4

import torch

from ds_affine.facts import facts_of
from ds_affine.figure import check_figure, rendered
from ds_affine.page import holders, page
from ds_affine.sides import read_sides
from ds_affine.tables import plain, show, size

MOST_ROWS = 50
PIECES = ("location", "shape", "first element", "strides", "held by")
COPIES = ("from location", "its element", "to location", "its element", "shape", "size", "processes", "held by", "why")


def run(options):
    """Return 0."""
    if options.figure:
        check_figure(options.figure)
    sides = read_sides(options.source, options.target, getattr(torch, options.dtype))
    name = options.name
    if name not in sides.target:
        near = [one for one in sides.target if name in one][:3] or get_close_matches(name, sides.target)
        hint = f"; did you mean {', '.join(map(plain, near))}?" if near else ""
        raise ValueError(f"no parameter {name!r} is in both layouts{hint}")
    plan = sides.plan(options.same_processes)
    if options.html or options.figure:
        _write(options, sides, plan)
        return 0
    print(f"{plain(name)}, shape {sides.target[name].logical_shape}")
    for side, layout in (("source", sides.source[name]), ("target", sides.target[name])):
        _show(f"\n{side}: elements of the parameter, and who has them", PIECES, piece_rows(layout),
              sum(map(len, layout.pieces_by_rank.values())))
    segments = plan[name].segments
    _show("\ncopies: from which holder each target takes its elements", COPIES,
          copy_rows(segments, sides.source[name], plan.endpoints, sides.dtype), len(segments))
    return 0


def _write(options, sides, plan):
    """The page, the figure or both; both are made before either is written."""
    facts = facts_of(plan, None)
    html = options.html and page(options.name, sides, plan, facts)
    if options.figure:
        content = rendered(options.figure, options.name, sides, plan, facts, (options.source, options.target))
        _write_whole(Path(options.figure), content)
    if options.html:
        _write_whole(Path(options.html), html.encode(errors="backslashreplace"))


def _write_whole(path, content):
    """Write a file that appears whole or not at all; what is no file, such as /dev/stdout, as it is."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    beside = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    try:
        with open(beside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _show(title, columns, rows, count):
    """Some of `count` rows; others are not made."""
    show(title, columns, list(islice(rows, MOST_ROWS)))
    if count > MOST_ROWS:
        print(f"... and {count - MOST_ROWS:,} more")


def piece_rows(layout):
    """One row for each piece of a map: its shape, and its first element and strides in the whole parameter."""
    for location in layout.shard_shapes:
        for piece in layout.pieces_by_rank.get(location, ()):
            yield (str(location), str(piece.shape), str(piece.source_offset), str(piece.source_strides),
                   holders(piece.locations))


def copy_rows(segments, source, endpoints, dtype):
    """One row for each segment of a plan, with the locations that hold its first element too."""
    for segment in segments:
        held = next(
            (piece.locations
             for piece in source.pieces_by_rank[segment.source_rank] if has_address(piece, segment.source_offset)),
            {segment.source_rank})
        sender, receiver = endpoints.source[segment.source_rank], endpoints.target[segment.target_rank]
        yield (str(segment.source_rank), str(segment.source_offset), str(segment.target_rank),
               str(segment.target_offset), str(segment.shape), size(prod(segment.shape) * dtype.itemsize),
               f"{sender} to {receiver}", holders(held), _why(held, sender == receiver))


def _why(held, is_local):
    """How `plan_transfers` chooses of several holders by default."""
    if len(held) == 1:
        return "the only holder"
    return "on the same process" if is_local else "has least to send so far"


def has_address(piece, address):
    """Whether an address of the shard is one of this piece's, whose strides nest."""
    rest = address - piece.dest_offset
    for stride, count in sorted(zip(piece.dest_strides, piece.shape), reverse=True):
        if count > 1 and rest >= 0:
            rest -= min(rest // stride, count - 1) * stride
    return rest == 0
