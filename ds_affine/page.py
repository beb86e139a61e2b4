# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One page about one parameter and its plan, in one file that loads nothing: HTML, style, script and data."""

import html
import json
import re
from collections import Counter
from importlib import resources
from math import prod

# A piece that is more rectangles than this is drawn as what they span.
MOST_RECTANGLES = 64
MOST_ROWS = 200
HEAVIEST = 20
# Rows and columns of the picture of the traffic: more processes share one.
MOST_CELLS = 256


def page(name, sides, plan, facts):
    """The page as text.

    Args:
        name: of the parameter. sides: `Sides`. plan: the `ModelPlan` between them. facts: its `facts_of`.
    """
    own = plan[name]
    data = {
        "grids": [grid(sides.source[name]), grid(sides.target[name])],
        "traffic": traffic(facts["links"]),
    }
    values = {
        "name":
        html.escape(name),
        "shape":
        html.escape(str(sides.target[name].logical_shape)),
        "numbers":
        _table(("", "this parameter", "all parameters"), [
            ("copies", f"{len(own.segments):,}", f"{facts['segments']:,}"),
            ("elements that are written", f"{own.moved_elements:,}", ""),
            ("bytes between processes", "", f"{facts['sent_bytes']:,}"),
            ("bytes within processes", "", f"{facts['local_bytes']:,}"),
        ]),
        "links":
        _table(("from process", "to process", "bytes"),
               [(str(one), str(other), f"{size:,}") for one, other, size in facts["links"][:HEAVIEST]]),
        "more_links":
        _more(len(facts["links"]), HEAVIEST),
        "copies":
        _table(("from location", "at", "to location", "at", "shape"),
               [_copy(one) for one in own.segments[:MOST_ROWS]]),
        "more_copies":
        _more(len(own.segments), MOST_ROWS),
        # Numbers now; a name that were among them could not end the script.
        "data":
        json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    text = resources.files("ds_affine").joinpath("page.html").read_text(encoding="utf-8")
    # In one go: a name may look like a place of the template.
    return re.sub(r"@(\w+)@", lambda place: values[place[1]], text)


def grid(layout):
    """A map as rectangles over the parameter's rows (all axes but the last) and columns.

    Returns:
        `{"rows": R, "columns": C, "pieces": [[location, holders, [[row, column, height, width], ...]], ...]}`.
    """
    shape = layout.logical_shape or (1, )
    pieces = [[location, sorted(piece.locations), rectangles(piece, shape)] for location in layout.shard_shapes
              for piece in layout.pieces_by_rank.get(location, ()) if piece.numel]  # yapf: disable
    return {"rows": prod(shape[:-1]), "columns": shape[-1], "pieces": pieces}


def traffic(links):
    """The bytes between processes, or between groups of neighbouring ones where there are many.

    Returns:
        `{"from": [[first, last], ...], "to": ..., "cells": [[place in from, place in to, bytes], ...]}`.
    """
    ends, places = [], []
    for side in (0, 1):
        processes = sorted({link[side] for link in links})
        size = max(1, -(-len(processes) // MOST_CELLS))
        groups = [processes[start:start + size] for start in range(0, len(processes), size)]
        ends.append([[group[0], group[-1]] for group in groups])
        places.append({process: number for number, group in enumerate(groups) for process in group})
    cells = Counter()
    for source, target, numbytes in links:
        cells[places[0][source], places[1][target]] += numbytes
    return {"from": ends[0], "to": ends[1], "cells": [[*cell, numbytes] for cell, numbytes in cells.items()]}


def block(piece, shape):
    """Where a piece, a block of the parameter, begins and how far it goes along each of the parameter's axes."""
    strides = [prod(shape[axis + 1:]) for axis in range(len(shape))]
    origin, rest = [], piece.source_offset
    for stride in strides:
        index, rest = divmod(rest, stride)
        origin.append(index)
    extent = [1] * len(shape)
    for size, stride in zip(piece.shape, piece.source_strides):
        if size > 1:
            extent[max(axis for axis, own in enumerate(strides) if own == stride and shape[axis] > 1)] = size
    return origin, extent


def rectangles(piece, shape):
    """Where a piece lies: `[row, column, height, width]`, rows counting all axes but the last."""
    origin, extent = block(piece, shape)
    column, width = origin[-1], extent[-1]
    starts, height, step = [0], 1, 1
    for size, first, count in zip(reversed(shape[:-1]), reversed(origin[:-1]), reversed(extent[:-1])):
        if height == step:
            # All of the axes inside: rows follow one another.
            starts, height = [start + first * step for start in starts], count * step
        else:
            starts = [start + (first + index) * step for index in range(count) for start in starts]
        step *= size
    if len(starts) > MOST_RECTANGLES:
        return [[starts[0], column, starts[-1] + height - starts[0], width]]
    return [[start, column, height, width] for start in starts]


def holders(locations):
    """Some location ids in a few words."""
    ids = sorted(locations)
    return ", ".join(map(str, ids[:4])) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")


def _copy(segment):
    return (str(segment.source_rank), f"{segment.source_offset:,}", str(segment.target_rank),
            f"{segment.target_offset:,}", str(segment.shape))


def _more(count, shown):
    return f"<p>... and {count - shown:,} more</p>" if count > shown else ""


def _table(columns, rows):
    head = "".join(f"<th scope=col>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
