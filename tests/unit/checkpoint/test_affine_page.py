# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The page of `ds_affine explain --html`, as far as it can be told without a browser."""

import html
import json
import re
from math import prod

import numpy as np
import pytest
from hypothesis import given

import affine_strategies
from deepspeed.checkpoint.affine import contiguous_split_map, replicated_map, zero3_partition_map
from ds_affine.cli import main
from ds_affine.page import MOST_RECTANGLES, grid, rectangles, traffic


def painted(layout):
    """For each element the locations in whose rectangles it lies."""
    drawn = grid(layout)
    held = [[set() for _ in range(drawn["columns"])] for _ in range(drawn["rows"])]
    for location, _, rects in drawn["pieces"]:
        for row, column, height, width in rects:
            for line in held[row:row + height]:
                for cell in line[column:column + width]:
                    cell.add(location)
    return [cell for line in held for cell in line]


def elements(layout):
    """The same from the addresses of the pieces."""
    held = [set() for _ in range(layout.numel)]
    for location, pieces in layout.pieces_by_rank.items():
        for piece in pieces:
            for index in np.ndindex(*piece.shape):
                at = piece.source_offset + sum(one * stride for one, stride in zip(index, piece.source_strides))
                held[at].add(location)
    return held


@given(affine_strategies.shapes(min_axes=0, max_axes=4), affine_strategies.st.integers(1, 5))
def test_every_element_is_painted_for_its_holders(shape, ranks):
    layouts = [zero3_partition_map(shape, ranks), replicated_map(shape, ranks)]
    for axis, size in enumerate(shape):
        share, rest = divmod(size, ranks)
        layouts.append(contiguous_split_map(shape, [share + (rank < rest) for rank in range(ranks)], axis))
    for layout in layouts:
        if layout.numel:
            assert painted(layout) == elements(layout)


def test_a_piece_of_very_many_rectangles_is_drawn_as_what_they_span():
    layout = contiguous_split_map((100, 4, 3), [1, 3], 1)
    piece, = layout.pieces_by_rank[0]
    assert 100 > MOST_RECTANGLES and rectangles(piece, (100, 4, 3)) == [[0, 0, 397, 3]]


def test_traffic_of_many_processes_is_that_of_groups():
    links = [[source, 1000 + target, 1 + source] for source in range(600) for target in range(2)]
    drawn = traffic(links)
    assert drawn["from"][0] == [0, 2] and drawn["from"][-1] == [597, 599] and len(drawn["from"]) == 200
    assert drawn["to"] == [[1000, 1000], [1001, 1001]]
    assert sum(cell[2] for cell in drawn["cells"]) == sum(link[2] for link in links)
    assert [0, 0, 1 + 2 + 3] in drawn["cells"]


def written(tmp_path, shapes, source, target, name):
    table, path = tmp_path / "model.json", tmp_path / "page.html"
    table.write_text(json.dumps({"parameters": shapes}))
    assert main(["explain", name, f"{source}:{table}", target, "--html", str(path)]) == 0
    return table, path.read_text(encoding="utf-8")


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_numbers_are_those_of_the_plan(tmp_path, capsys):
    shapes = {"up": (1024, 512), "down": (512, 1024), "norm": (512, )}
    table, text = written(tmp_path, shapes, "zero3-256", "columns-8", "up")
    assert len(text.encode()) < 2_000_000
    assert main(["plan", f"zero3-256:{table}", "columns-8", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    data = data_of(text)
    assert sum(cell[2] for cell in data["traffic"]["cells"]) == facts["sent_bytes"]
    assert f"<td>{facts['segments']:,}</td>" in text and f"<td>{facts['sent_bytes']:,}</td>" in text
    one, other, numbytes = facts["links"][0]
    assert f"<tr><td>{one}</td><td>{other}</td><td>{numbytes:,}</td></tr>" in text
    assert [drawn["rows"] * drawn["columns"] for drawn in data["grids"]] == [prod(shapes["up"])] * 2


@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "a & b", '"quoted"', "@data@"])
def test_a_name_is_only_a_name(tmp_path, name):
    _, text = written(tmp_path, {name: (4, 4)}, "zero3-2", "rows-2", name)
    assert text.count("<script") == 2 and "alert(1)</script>" not in text
    assert data_of(text)["grids"][0]["rows"] == 4 and f"<h1>{html.escape(name)}</h1>" in text


def test_the_page_loads_nothing(tmp_path):
    _, text = written(tmp_path, {"w": (4, 4)}, "zero3-2", "rows-2", "w")
    assert "default-src 'none'" in text and not re.search(r"(src|href)\s*=", text) and "http:" not in text
