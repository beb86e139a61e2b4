# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Tables as plain text: they can be piped, searched and are never cut."""


def show(title, columns, rows, right=0):
    """Print a table; the last `right` columns are numbers."""
    lines = [columns, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    first_number = len(columns) - right
    print(title)
    for line in lines:
        cells = (cell.rjust(width) if index >= first_number else cell.ljust(width)
                 for index, (cell, width) in enumerate(zip(line, widths)))
        print("  ".join(cells).rstrip())
