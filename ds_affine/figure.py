# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The pictures of a parameter and its plan for papers: as matplotlib figures in SVG, PNG or PDF."""

import io
import re
from math import prod
from pathlib import Path

import numpy as np

from ds_affine import tables
from ds_affine.page import block, holders, traffic

FORMATS = (".svg", ".png", ".pdf")
# Rows and columns of a drawn parameter: of one that has more, so many are looked at.
MOST_SAMPLES = 1024
# Sets of holders that get a colour and a word each; more get a scale of colours.
MOST_NAMED = 10
# Processes whose cells have a line between them.
MOST_PARTED = 32
HEAVIEST = 10
MOST_LETTERS = 200
LETTERS_IN_LINE = 95
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
# Text stays text, no file depends on when it was written, and no name is read as TeX.
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "ds_affine",
    "pdf.fonttype": 42,
    "text.usetex": False,
}
NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}


def check_figure(path):
    """Raise before anything is computed if no figure can be drawn into a file of this name.

    Raises:
        ValueError: a suffix that is none of `FORMATS`, or matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"--figure {path}: the name must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError(f"--figure {path}: drawing takes the package matplotlib; "
                         "pip install 'deepspeed-affine[figures]'") from None


def rendered(path, name, sides, plan, facts, layouts):
    """The bytes of the file `path`, in the format that its suffix says. Arguments as of `draw`."""
    import matplotlib
    kind, content = Path(path).suffix.lower()[1:], io.BytesIO()
    with matplotlib.rc_context(STYLE):
        draw(name, sides, plan, facts, layouts).savefig(content, format=kind, dpi=300, metadata=NO_DATE[kind])
    return content.getvalue()


def draw(name, sides, plan, facts, layouts):
    """The figure.

    Args:
        name: of the parameter. sides: `Sides`. plan: the `ModelPlan` between them. facts: its `facts_of`.
        layouts: source and target, as the user named them.

    Returns:
        `matplotlib.figure.Figure`, whose axes have the labels source, target, traffic and links.
    """
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7.2, 6.4), layout="constrained")
    figure.suptitle(title(name, sides, plan, facts, layouts), fontsize=8, parse_math=False)
    upper, lower = figure.subfigures(2, 1)
    source, target = upper.subplots(1, 2)
    _draw_holders(source, sides.source[name], "source", "who holds what")
    _draw_holders(target, sides.target[name], "target", "who wants what")
    matrix, links = lower.subplots(1, 2)
    _draw_traffic(matrix, traffic(facts["links"]))
    _draw_links(links, facts["links"])
    return figure


def title(name, sides, plan, facts, layouts):
    """What the figure is about, in a few lines without control characters."""
    own, dtype = plan[name], sides.dtype
    source, target = (shortened(_short(layout)) for layout in layouts)
    lines = [
        f"shape {sides.target[name].logical_shape}, {str(dtype).removeprefix('torch.')}, {source} to {target}",
        f"this parameter: {own.moved_elements * dtype.itemsize:,} bytes written, copies: {len(own.segments):,}",
        f"all parameters ({facts['parameters']:,}): {facts['sent_bytes']:,} bytes between processes, "
        f"{facts['local_bytes']:,} within"
    ]
    return "\n".join(part for line in (shortened(name), *lines) for part in _lines(line))


def shortened(text):
    """A text in one line: what no font can draw and no XML may hold, such as a line break, as Python writes it. Very
    long ones lose their middle."""
    text = tables.plain(text)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS // 2]} ... {text[-MOST_LETTERS // 2:]}"


def held_by(layout):
    """Who holds the elements of a parameter, for all of its rows (all axes but the last) and columns, or for
    `MOST_SAMPLES` of each.

    Returns:
        The sets of holders that there are, as sorted tuples in order; and int64[rows, columns], the place of each
        element's holders among them. Maps that can be planned leave no element out.
    """
    shape = _with_rows(layout.logical_shape)
    rows, columns = _samples(prod(shape[:-1])), _samples(shape[-1])
    index = np.array(np.unravel_index(rows, shape[:-1]))
    # Every holder lists the pieces that it holds: the first of them will do.
    pieces = [(tuple(sorted(piece.locations)), block(piece, shape)) for location in layout.shard_shapes
              for piece in layout.pieces_by_rank.get(location, ())
              if piece.numel and location == min(piece.locations)]  # yapf: disable
    sets = sorted({held for held, _ in pieces})
    place = {held: number for number, held in enumerate(sets)}
    cells = np.zeros((len(rows), len(columns)), dtype=np.int64)
    for held, (origin, extent) in pieces:
        start = np.array(origin[:-1]).reshape(-1, 1)
        inside = (index >= start) & (index < start + np.array(extent[:-1]).reshape(-1, 1))
        first, last = np.searchsorted(columns, [origin[-1], origin[-1] + extent[-1]])
        cells[inside.all(axis=0), first:last] = place[held]
    return sets, cells


def _samples(size):
    """All of so many indices, or one from each of `MOST_SAMPLES` equal parts, at places that differ: else only one of
    the pieces that take turns in the rows might be seen."""
    if size <= MOST_SAMPLES:
        return np.arange(size)
    number = np.arange(MOST_SAMPLES)
    return ((number + number * 0.6180339887 % 1) * (size / MOST_SAMPLES)).astype(np.int64)


def _with_rows(shape):
    return (1, ) * (2 - len(shape)) + tuple(shape)


def _draw_holders(axes, layout, side, words):
    sets, cells = held_by(layout)
    shape = _with_rows(layout.logical_shape)
    rows, columns = prod(shape[:-1]), shape[-1]
    axes.set_label(side)
    axes.set_title(f"{side}: {words}")
    if not cells.size:
        _say(axes, "no elements")
        return
    few = len(sets) <= MOST_NAMED
    image = axes.imshow(cells,
                        cmap="tab10" if few else "viridis",
                        vmin=0,
                        vmax=(MOST_NAMED if few else len(sets)) - 1,
                        extent=(0, columns, rows, 0),
                        aspect="auto",
                        interpolation="nearest")
    axes.set_xlabel("column (elements)")
    _tick(axes.xaxis, _spread(columns), "{:,}".format)
    if len(layout.logical_shape) < 2:
        axes.set_yticks([])
    else:
        axes.set_ylabel("row (elements)" if len(shape) == 2 else f"row (elements of axes 0 to {len(shape) - 2})")
        _tick(axes.yaxis, _spread(rows), "{:,}".format)
    if few:
        _name_colours(axes, image, sets)
    else:
        label = "location" if _alone(sets) else "first of the locations"
        scale = axes.figure.colorbar(image, ax=axes, label=label)
        _tick(scale.ax.yaxis, _spread(len(sets) - 1), lambda place: str(sets[place][0]))


def _name_colours(axes, image, sets):
    from matplotlib.patches import Patch
    words = [holders(held) for held in sets]
    # In points: a letter takes 5, what is around it 24, the width of the axes is about 210.
    lines = -(-len(sets) // max(1, 210 // (24 + 5 * max(map(len, words)))))
    axes.legend(handles=[Patch(color=image.cmap(image.norm(number)), label=word) for number, word in enumerate(words)],
                title="location" if _alone(sets) else "locations",
                loc="upper center",
                bbox_to_anchor=(0.5, -0.25),
                ncols=-(-len(sets) // lines),
                columnspacing=1,
                frameon=False,
                handlelength=1,
                handleheight=1)


def _alone(sets):
    return all(len(held) == 1 for held in sets)


def _draw_traffic(axes, drawn):
    axes.set_label("traffic")
    shape = len(drawn["from"]), len(drawn["to"])
    axes.set_title("traffic of all parameters" + (" (white: none)" if len(drawn["cells"]) < prod(shape) else ""))
    if not drawn["cells"]:
        _say(axes, "nothing goes between processes")
        return
    sent = np.zeros(shape, dtype=np.int64)
    for row, column, numbytes in drawn["cells"]:
        sent[row, column] = numbytes
    image = axes.imshow(np.ma.masked_equal(sent, 0), cmap="viridis_r", vmin=0, aspect="auto", interpolation="nearest")
    for axis, word in ((axes.yaxis, "from"), (axes.xaxis, "to")):
        ends = drawn[word]
        grouped = any(first != last for first, last in ends)
        axis.set_label_text(f"{word} process" + (" (the first of each group)" if grouped else ""))
        _tick(axis, _spread(len(ends) - 1), lambda place: str(ends[place][0]))
        if len(ends) <= MOST_PARTED:
            axis.set_ticks(np.arange(1, len(ends)) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    _tick_bytes(axes.figure.colorbar(image, ax=axes).ax.yaxis, int(sent.max()))


def _draw_links(axes, links):
    shown = links[:HEAVIEST]
    axes.set_label("links")
    axes.set_title(f"heaviest {len(shown)} of {len(links):,} links" if len(shown) < len(links) else "links")
    if not shown:
        _say(axes, "nothing goes between processes")
        return
    axes.barh(range(len(shown)), [numbytes for _, _, numbytes in shown], color="tab:blue", height=0.7)
    axes.set_yticks(range(len(shown)), [f"{source} to {target}" for source, target, _ in shown])
    # The first on top, and a few no thicker than several.
    axes.set_ylim(max(len(shown), 6) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylabel("processes")
    _tick_bytes(axes.xaxis, shown[0][2])


def _say(axes, words):
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes)


def _tick(axis, places, word):
    axis.set_ticks(places, [word(place) for place in places])


def _spread(last):
    """Some whole numbers from 0 to `last`: its quarters, or at equal distances where it is small and has none."""
    if last < 24 and last % 4:
        return list(range(0, last + 1, -(-(last + 1) // 6)))
    return sorted({last * quarter // 4 for quarter in range(5)})


def _tick_bytes(axis, most):
    """Label an axis of bytes in the largest unit that most of them reach."""
    from matplotlib.ticker import MaxNLocator
    power = min((most.bit_length() - 1) // 10, len(UNITS) - 1)
    unit = 1 << 10 * power
    ticks = [tick for tick in MaxNLocator(5).tick_values(0, most / unit) if tick * unit <= most]
    axis.set_ticks([tick * unit for tick in ticks], [f"{tick:g}" for tick in ticks])
    axis.set_label_text(UNITS[power])


def _short(layout):
    """`zero3-64` of `zero3-64:models/llama.json`, `checkpoints` of `runs/7/checkpoints`."""
    word = re.match(r"\w+-\d+(?=:|$)", layout)
    return word[0] if word else Path(layout).name or layout


def _lines(text):
    return [text[start:start + LETTERS_IN_LINE] for start in range(0, len(text), LETTERS_IN_LINE)]
