# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The pictures of `ds_affine explain --figure`: what is drawn is read back from the figure, not from pixels."""

import json
import subprocess
import sys
from collections import Counter
from math import prod
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from matplotlib import colormaps
from matplotlib.colors import to_rgba

import affine_strategies
from affine_oracle import element_holders
from deepspeed.checkpoint.affine import (contiguous_split_map, keep_locations, replicated_map, union_affine_maps,
                                         zero3_partition_map)
from ds_affine import figure
from ds_affine.cli import main
from ds_affine.plan_command import facts_of
from ds_affine.sides import Sides

SHAPES = {"up": (6, 4), "down": (4, 6), "norm": (5, )}


def rows(shape, ranks):
    share, rest = divmod(shape[0], ranks)
    return contiguous_split_map(shape, [share + (rank < rest) for rank in range(ranks)], 0)


def drawn(source, target, name="up", layouts=("one", "other"), together=False):
    """Facts of a plan, and the axes of its figure by label."""
    sides = Sides(source, target, torch.bfloat16)
    plan = sides.plan(together)
    facts = facts_of(plan, None)
    made = figure.draw(name, sides, plan, facts, layouts)
    return facts, {axes.get_label(): axes for axes in made.axes}, made


def zero3_to_rows(ranks, targets):
    return ({
        name: zero3_partition_map(shape, ranks)
        for name, shape in SHAPES.items()
    }, {
        name: rows(shape, targets)
        for name, shape in SHAPES.items()
    })


def links_of(source, target, first_target):
    """Bytes by (process, process), element by element: sources here have no replicas."""
    sent = Counter()
    for name, shape in SHAPES.items():
        owner, wanted = element_holders(source[name]), element_holders(target[name])
        for element in range(prod(shape)):
            for location in wanted[element]:
                (holder, ) = owner[element]
                sent[holder, location + first_target] += 2
    return sent


def words(axes):
    return [label.get_text() for label in axes]


def labelled_colours(axes):
    legend = axes.get_legend()
    return {text.get_text(): patch.get_facecolor() for text, patch in zip(legend.get_texts(), legend.get_patches())}


@given(affine_strategies.shapes(0, 4).flatmap(affine_strategies.layouts))
def test_every_element_is_drawn_for_its_holders(layout):
    sets, cells = figure.held_by(layout.map)
    assert [set(sets[place]) for place in cells.reshape(-1).tolist()] == element_holders(layout.map)


@pytest.mark.parametrize("layout", [
    zero3_partition_map((6, 4), 5),
    replicated_map((6, 4), 3),
    zero3_partition_map((6, 4), 2, locations=[[0, 4], [1, 5]]),
    union_affine_maps([rows(
        (6, 4), 2), keep_locations(zero3_partition_map((6, 4), 4, locations=range(7, 11)), [8])]),
],
                         ids=["zero3", "whole", "replicas", "union"])
def test_colours_are_those_of_the_holders(layout):
    _, axes, _ = drawn({"up": layout}, {"up": rows((6, 4), 2)})
    image, = axes["source"].get_images()
    colours = labelled_colours(axes["source"])
    assert len(set(colours.values())) == len(colours)
    expected = [colours[", ".join(map(str, sorted(held)))] for held in element_holders(layout)]
    assert np.allclose(image.to_rgba(image.get_array()).reshape(-1, 4), expected)
    assert image.get_extent() == [0, 4, 6, 0]


def test_many_holders_have_a_scale():
    _, axes, made = drawn({"up": zero3_partition_map((6, 4), 24)}, {"up": rows((6, 4), 6)})
    image, = axes["source"].get_images()
    assert axes["source"].get_legend() is None and axes["target"].get_legend() is not None
    expected = [colormaps["viridis"](held.pop() / 23) for held in element_holders(zero3_partition_map((6, 4), 24))]
    assert np.allclose(image.to_rgba(image.get_array()).reshape(-1, 4), expected)
    scale = image.colorbar.ax.yaxis
    assert dict(zip(scale.get_ticklocs(), words(scale.get_ticklabels()))) == {
        place: str(place)
        for place in range(0, 24, 4)
    }


def test_numbers_are_those_of_the_plan():
    source, target = zero3_to_rows(5, 3)
    facts, axes, made = drawn(source, target)
    expected = links_of(source, target, 5)
    image, = axes["traffic"].get_images()
    sent = image.get_array().filled(0)
    ends = [words(axis.get_majorticklabels()) for axis in (axes["traffic"].yaxis, axes["traffic"].xaxis)]
    assert ends == [[str(rank) for rank in range(5)], [str(rank) for rank in range(5, 8)]]
    assert {(row, column + 5): sent[row, column] for row, column in zip(*sent.nonzero())} == expected
    bars = axes["links"].patches
    links = dict(zip(words(axes["links"].get_yticklabels()), (bar.get_width() for bar in bars), strict=True))
    assert links == {f"{link[0]} to {link[1]}": link[2] for link in facts["links"][:figure.HEAVIEST]}
    assert links == {f"{one} to {other}": expected[one, other] for one, other, _ in facts["links"][:figure.HEAVIEST]}
    assert all(to_rgba("tab:blue") == bar.get_facecolor() for bar in bars)
    said = made.texts[0].get_text()
    assert f"{sum(expected.values()):,} bytes between processes, 0 within" in said
    copies = len(Sides(source, target, torch.bfloat16).plan(False)["up"].segments)
    assert f"this parameter: 48 bytes written, copies: {copies}\n" in said
    assert "shape (6, 4), bfloat16, one to other" in said


def test_bytes_have_a_unit():
    source, target = {"up": zero3_partition_map((3072, 2048), 2)}, {"up": rows((3072, 2048), 1)}
    _, axes, _ = drawn(source, target)
    ticks = axes["links"].xaxis
    labelled = dict(zip(words(ticks.get_ticklabels()), ticks.get_ticklocs()))
    assert ticks.get_label_text() == "MiB" and labelled["6"] == 6 << 20
    scale = axes["traffic"].get_images()[0].colorbar.ax.yaxis
    assert scale.get_label_text() == "MiB" and words(scale.get_ticklabels())[0] == "0"


def test_nothing_between_processes_is_said():
    maps = {"up": rows((6, 4), 2)}
    _, axes, made = drawn(maps, maps, together=True)
    for label in ("traffic", "links"):
        assert not axes[label].get_images() and not axes[label].patches
        assert words(axes[label].texts) == ["nothing goes between processes"]
    assert "0 bytes between processes, 48 within" in made.texts[0].get_text()


def test_a_parameter_without_elements_is_drawn():
    _, axes, _ = drawn({"up": replicated_map((0, 4), 2)}, {"up": replicated_map((0, 4), 1)})
    assert words(axes["source"].texts) == ["no elements"]


def test_large_parameters_are_looked_at_in_all_of_their_parts():
    """Rows that eight locations hold in turn: samples at equal distances would all be of one of them."""
    layout = contiguous_split_map((4 * figure.MOST_SAMPLES, 8, 2), [1] * 8, 1)
    sets, cells = figure.held_by(layout)
    assert cells.shape == (figure.MOST_SAMPLES, 2)
    assert min(np.bincount(cells[:, 0])) > figure.MOST_SAMPLES / 16
    halves, cells = figure.held_by(rows((10 * figure.MOST_SAMPLES, 1), 2))
    assert np.bincount(cells[:, 0]).tolist() == [figure.MOST_SAMPLES / 2] * 2 and (np.diff(cells[:, 0]) >= 0).all()


@given(st.integers(1, 1 << 40))
def test_samples_are_in_order_and_inside(size):
    places = figure._samples(size)
    assert len(places) == min(size, figure.MOST_SAMPLES) and (np.diff(places) >= 0).all()
    assert 0 <= places[0] and places[-1] < size


def run(tmp_path, shapes, source, target, name, *options):
    """Exit code of the command, whose figure is to be written beside the table."""
    table = tmp_path / "model.json"
    table.write_text(json.dumps({"parameters": shapes}))
    return main(["explain", name, f"{source}:{table}", target, *map(str, options)])


def text_of(path):
    """The lines of text in an SVG."""
    return [
        "".join(one.itertext()).strip() for one in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_svg_is_xml_with_text_that_can_be_found(tmp_path):
    path = tmp_path / "figure.svg"
    assert run(tmp_path, SHAPES, "zero3-4", "columns-2", "up", "--figure", path) == 0
    found = text_of(path)
    assert {"up", "shape (6, 4), bfloat16, zero3-4 to columns-2"} < set(found)
    assert {"row (elements)", "column (elements)", "from process", "to process", "bytes"} < set(found)
    first = path.read_bytes()
    assert run(tmp_path, SHAPES, "zero3-4", "columns-2", "up", "--figure", path) == 0
    assert path.read_bytes() == first and sorted(tmp_path.iterdir()) == [path, tmp_path / "model.json"]


@pytest.mark.parametrize("suffix, signature", [("png", b"\x89PNG\r\n\x1a\n"), ("PNG", b"\x89PNG\r\n\x1a\n"),
                                               ("pdf", b"%PDF-")])
def test_other_formats_have_their_signatures(tmp_path, suffix, signature):
    path = tmp_path / f"figure.{suffix}"
    assert run(tmp_path, SHAPES, "zero3-4", "columns-2", "up", "--figure", path) == 0
    assert path.read_bytes().startswith(signature)


def test_figure_and_page_are_written_together(tmp_path):
    svg, page = tmp_path / "figure.svg", tmp_path / "page.html"
    assert run(tmp_path, SHAPES, "zero3-4", "columns-2", "up", "--figure", svg, "--html", page) == 0
    assert "up" in text_of(svg) and "<h1>up</h1>" in page.read_text()


@pytest.mark.parametrize("ranks", [1, 1000])
@pytest.mark.parametrize("name", ["matrix", "vector", "scalar"])
def test_few_and_many_ranks(tmp_path, ranks, name):
    path, shapes = tmp_path / "figure.svg", {"matrix": (2000, 30), "vector": (3000, ), "scalar": ()}
    assert run(tmp_path, shapes, f"zero3-{ranks}", "columns-3", name, "--figure", path) == 0
    assert f"shape {shapes[name]}, bfloat16, zero3-{ranks} to columns-3" in text_of(path)
    assert ("from process (the first of each group)" in text_of(path)) == (ranks > 256)
    # It does not grow with the number of pieces.
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize("name, shown", [
    ("<b>&amp;</b>", "<b>&amp;</b>"),
    ("$x^2$ \\frac_{", "$x^2$ \\frac_{"),
    ("two\nlines\x00\x1b", "two\\nlines\\x00\\x1b"),
    ("\ud800", "\\ud800"),
    ("x" * 999, "x" * 95),
])
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_name_is_only_a_name(tmp_path, name, shown, suffix):
    path = tmp_path / f"figure.{suffix}"
    assert run(tmp_path, {name: (4, 4)}, "zero3-2", "rows-2", name, "--figure", path) == 0
    if suffix == "svg":
        assert shown in text_of(path)


@pytest.mark.parametrize("file", ["figure.gif", "figure", "svg", "figure.svg.txt"])
def test_another_suffix_is_told_before_anything_is_read(tmp_path, capsys, file):
    code = main(["explain", "up", "zero3-2:missing.json", "rows-2", "--figure", str(tmp_path / file)])
    assert code == 2 and "must end in .svg, .png or .pdf" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_is_told_before_anything_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = tmp_path / "page.html"
    code = main(["explain", "up", "zero3-2:missing.json", "rows-2", "--figure", "figure.svg", "--html", str(page)])
    assert code == 2 and "pip install 'deepspeed-affine[figures]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_told(tmp_path, capsys):
    page = tmp_path / "page.html"
    code = run(tmp_path, SHAPES, "zero3-4", "columns-2", "up", "--figure", tmp_path / "no" / "f.svg", "--html", page)
    assert code == 2 and "No such file or directory" in capsys.readouterr().err and not page.exists()


def test_a_file_that_cannot_be_renamed_leaves_nothing(tmp_path, capsys):
    (tmp_path / "figure.svg").mkdir()
    assert run(tmp_path, SHAPES, "zero3-4", "columns-2", "up", "--figure", tmp_path / "figure.svg") == 2
    assert "ds_affine explain: " in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure.svg", "model.json"]


def test_settings_of_others_are_left_alone(tmp_path):
    """No pyplot, no change of matplotlib's settings; and no matplotlib where no figure is asked for."""
    (tmp_path / "model.json").write_text(json.dumps({"parameters": SHAPES}))
    script = ("import sys; from ds_affine.cli import main\n"
              "side = 'zero3-4:model.json'\n"
              "assert main(['explain', 'up', side, 'rows-2', '--html', 'p.html']) == 0\n"
              "assert 'matplotlib' not in sys.modules\n"
              "import matplotlib; before = matplotlib.rcParams.copy()\n"
              "assert main(['explain', 'up', side, 'rows-2', '--figure', 'f.svg']) == 0\n"
              "assert matplotlib.rcParams.copy() == before and 'matplotlib.pyplot' not in sys.modules\n")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=200)
