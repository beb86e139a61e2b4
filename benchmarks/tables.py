# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the benchmarks share: CPU time, requirements, and tables that need no library."""

import os
import platform
import sys
import time
from dataclasses import dataclass
from typing import Optional


def cpu_seconds(work):
    """CPU seconds of a call, and what it returned."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def number(value):
    """A figure with as many digits as say something."""
    if value >= 100:
        return f'{value:,.0f}'
    return f'{value:.2f}' if value >= 1 else f'{value:.3f}'


@dataclass(frozen=True)
class Requirement:
    """A bound on a figure of this run; ``found`` is None where it was not measured, ``unit`` says what it counts."""
    found: Optional[float]
    unit: str
    least: Optional[float] = None
    most: Optional[float] = None

    @property
    def met(self):
        if self.found is None:
            return False
        return (self.least is None or self.found >= self.least) and (self.most is None or self.found <= self.most)

    @property
    def bound(self):
        return f'<= {self.most:,}' if self.least is None else f'>= {self.least:,}'

    @property
    def shown(self):
        if self.found is None:
            return 'not measured'
        return f'{number(self.found)} {self.unit}{"" if self.met else ", MISSED"}'


def add_options(parser):
    """Add the options that ``conclude`` reads."""
    parser.add_argument('--check',
                        action='store_true',
                        help='exit with 1 where a requirement is missed or not measured')
    parser.add_argument('--markdown', metavar='FILE', help='write the tables into this file, for the documentation')


def conclude(required, options, table, title):
    """Print what was measured and what must be shown, pairs of words and ``Requirement``; returns the exit code, 1
    where ``--check`` is given and something was missed."""
    verdicts = Table(('must be shown', 'found', 'required'), left=1)
    for what, requirement in required:
        verdicts.add(what, requirement.shown, requirement.bound)
    table.show(title)
    verdicts.show('What must be shown')
    if options.markdown:
        with open(options.markdown, 'w', encoding='utf-8') as file:
            file.write(f'{_written_by()}\n\n{table.markdown()}\n\n{verdicts.markdown()}\n')
    if options.check and not all(requirement.met for _, requirement in required):
        print('a requirement was missed or not measured', file=sys.stderr)
        return 1
    return 0


def _written_by():
    import torch
    return (f'Written by `{" ".join(["python", "benchmarks/" + os.path.basename(sys.argv[0]), *sys.argv[1:]])}` on '
            f'{time.strftime("%Y-%m-%d")}: {os.cpu_count()} cores, {platform.machine()}, Python '
            f'{platform.python_version()}, torch {torch.__version__}.')


class Table:
    """Rows of strings under named columns, of which the first ``left`` are aligned to the left."""

    def __init__(self, columns, left):
        self.columns, self.left, self.rows = columns, left, []

    def add(self, *cells):
        self.rows.append(cells)

    def show(self, title):
        """Print the table."""
        print(title, self._plain(), sep='\n', end='\n\n')

    def markdown(self):
        """The table in the Markdown of GitHub and MyST."""
        rules = ['---'] * self.left + ['---:'] * (len(self.columns) - self.left)
        rows = [self.columns, rules, *([cell.replace('|', '\\|') for cell in row] for row in self.rows)]
        return '\n'.join(f'| {" | ".join(row)} |' for row in rows)

    def _plain(self):
        rows = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) if position < self.left else cell.rjust(width)
                     for position, (cell, width) in enumerate(zip(row, widths))]  # yapf: disable
            lines.append('  '.join(cells).rstrip())
        return '\n'.join(lines)
