# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The table of the demo, with rich where it is installed and as plain text elsewhere."""

import sys
from dataclasses import replace

COLUMNS = ("parameter", "shape", "bytes sent", "if gathered", "copied locally", "segments", "plan s", "move s",
           "verdict")
PIPED_WIDTH = 110
LEGEND = ("* frozen: rollouts read what they can from the shards that they still hold of it.\n"
          "bytes sent: between processes. if gathered: what gather-then-cut would have sent, every whole parameter to "
          "each rollout.\n"
          "plan s, move s: seconds of the slowest process.")


def rows(lines_by_process):
    """Join what the processes say of each parameter: bytes are summed, seconds are those of the slowest.

    Exact means that every rollout found its shard exact.
    """
    return [_row(lines) for lines in zip(*lines_by_process.values())]


def show(table):
    """Print the rows, their total, and what they mean."""
    cells = [_cells(row) for row in table]
    total = _total(table)
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _show_plain([*cells, total])
        print(LEGEND)
        return
    drawn = Table(box=box.SIMPLE, show_edge=False, show_footer=True, padding=(0, 1, 0, 0), pad_edge=False)
    for title, footer, alignment in zip(COLUMNS, total, _alignments()):
        drawn.add_column(title.replace(" ", "\n"), footer, justify=alignment, no_wrap=True)
    for line in cells:
        drawn.add_row(*line)
    # No terminal has no width of its own; rich would take 80 columns and cut names.
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(drawn)
    print(LEGEND)


def _row(lines):
    first = lines[0]
    verdicts = [line.exact for line in lines if line.exact is not None]
    return replace(first,
                   sent_bytes=sum(line.sent_bytes for line in lines),
                   local_copy_bytes=sum(line.local_copy_bytes for line in lines),
                   plan_seconds=max(line.plan_seconds for line in lines),
                   move_seconds=max(line.move_seconds for line in lines),
                   exact=bool(verdicts) and all(verdicts))


def _cells(row):
    name = row.name.removesuffix(".weight") + ("*" if row.frozen else "")
    numbers = [f"{count:,}" for count in (row.sent_bytes, row.gathered_bytes, row.local_copy_bytes)]
    return (name, "x".join(map(str, row.shape)), *numbers, str(row.segments), f"{row.plan_seconds:.3f}",
            f"{row.move_seconds:.3f}", "exact" if row.exact else "WRONG")


def _total(table):
    fields = ("elements", "sent_bytes", "gathered_bytes", "local_copy_bytes", "segments")
    sums = [f"{sum(getattr(row, field) for row in table):,}" for field in fields]
    seconds = [f"{sum(getattr(row, field) for row in table):.3f}" for field in ("plan_seconds", "move_seconds")]
    return (f"{len(table)} parameters", *sums, *seconds, f"{sum(row.exact for row in table)}/{len(table)}")


def _alignments():
    return ("left", "left", "right", "right", "right", "right", "right", "right", "left")


def _show_plain(lines):
    widths = [max(len(line[index]) for line in (COLUMNS, *lines)) for index in range(len(COLUMNS))]
    for line in (COLUMNS, *lines):
        cells = (cell.ljust(width) if alignment == "left" else cell.rjust(width)
                 for cell, width, alignment in zip(line, widths, _alignments()))
        print("  ".join(cells).rstrip())
