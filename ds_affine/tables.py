# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Tables as plain text: they can be piped, searched and are never cut."""


def plain(text):
    """A text in one line that does nothing to a terminal: what is not printable as Python writes it."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def size(numbytes):
    """Bytes as one reads them, such as 1.50 GiB."""
    for unit, width in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if numbytes >= width:
            return f"{numbytes / width:,.2f} {unit}"
    return f"{numbytes} B"


def show(title, columns, rows, right=0):
    """Print a table; the last `right` columns are numbers."""
    lines = [columns, *([plain(cell) for cell in row] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    first_number = len(columns) - right
    print(title)
    for line in lines:
        cells = (cell.rjust(width) if index >= first_number else cell.ljust(width)
                 for index, (cell, width) in enumerate(zip(line, widths)))
        print("  ".join(cells).rstrip())
