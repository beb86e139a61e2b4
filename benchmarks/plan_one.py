# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What it costs to plan one parameter, beside DeepSpeed's own planner where that is installed.

Times are CPU seconds of this process, so other programs on the machine do not enter, and a check compares only what
was measured in the same run. See README.md beside this file.
"""

import argparse
import importlib.metadata
import importlib.util
import resource
import statistics
import sys
import time
import tracemalloc
import types
from dataclasses import dataclass
from typing import Callable, Optional

from deepspeed.checkpoint import affine
from deepspeed.checkpoint.affine import contiguous_split_map, relabel, union_affine_maps, zero3_partition_map
from deepspeed.checkpoint.affine_transfer import plan_transfer

OURS = 'ours'
COLUMNS = ('parameter', 'what', 'planner', 'maps s', 'work s', 'segments', 'us/segment', 'peak MiB', 'found',
           'required')

ROWS_COLUMNS = (16384, 8192)
UNEVEN = (16383, 8189)
HUGE = (2**20, 2**20)


@dataclass(frozen=True)
class Measured:
    """One row: seconds for the maps and for the work over them, and what came out.

    Attributes:
        maps, work: CPU seconds; ``maps`` is None where they were not timed.
        segments: of the plan, None where the work makes none.
        peak: bytes that were allocated at one time, None where they were not traced.
    """
    maps: Optional[float]
    work: float
    segments: Optional[int]
    peak: Optional[int]

    @property
    def per_segment(self):
        """Microseconds per segment, maps included."""
        return ((self.maps or 0.0) + self.work) / self.segments * 1e6


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
        return f'>= {self.least:,}' if self.most is None else f'<= {self.most:,}'

    @property
    def shown(self):
        if self.found is None:
            return 'not measured'
        return f'{_number(self.found)} {self.unit}{"" if self.met else ", MISSED"}'


@dataclass(frozen=True)
class Upstream:
    """DeepSpeed's own modules under private names, so that they stand beside ours in one process."""
    version: str
    affine: types.ModuleType
    transfer: types.ModuleType

    def plan_seconds(self, build):
        """CPU seconds and segments of one plan, with budgets that do not refuse it."""
        target, source = build(self.affine)
        budget = self.transfer.PlanBudget(max_pieces_per_map=2**62,
                                          max_pair_checks=2**62,
                                          max_segments=2**62,
                                          max_plan_bytes=2**62,
                                          max_merge_checks=2**62)
        seconds, plan = cpu_seconds(lambda: self.transfer.plan_transfer(target, source, budget))
        return Measured(None, seconds, len(plan.segments), None), plan


def find_upstream(folder):
    """Load DeepSpeed's planner.

    Args:
        folder: a site-packages folder that holds DeepSpeed, or None for the one that this Python sees.

    Returns ``(upstream, None)``, or ``(None, why)`` where there is none.
    """
    found = importlib.metadata.distributions(name='deepspeed', **({'path': [folder]} if folder else {}))
    distribution = next(iter(found), None)
    if distribution is None:
        return None, f'DeepSpeed is not installed{f" in {folder}" if folder else ""}'
    paths = {
        name: distribution.locate_file(f'deepspeed/checkpoint/{name}.py')
        for name in ('affine', 'affine_transfer')
    }
    if not all(path.is_file() for path in paths.values()):
        return None, f'DeepSpeed {distribution.version} has no planner'
    parent = types.ModuleType('upstream_deepspeed')
    parent.__path__ = []
    sys.modules[parent.__name__] = parent
    modules = [_load(f'{parent.__name__}.{name}', path) for name, path in paths.items()]
    return Upstream(distribution.version, *modules), None


def _load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def cpu_seconds(work):
    """CPU seconds of a call, and what it returned."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def measure(build, work, runs):
    """Median times of ``work(*build())``; maps are made anew for every run, so nothing is left from the one before.

    Memory is traced in a run of its own, because tracing is slow. It comes first, so that no timed run is the first of
    its kind in the process.
    """
    tracemalloc.start()
    work(*build())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    maps, works = [], []
    for _ in range(runs):
        seconds, built = cpu_seconds(build)
        maps.append(seconds)
        seconds, result = cpu_seconds(lambda: work(*built))
        works.append(seconds)
    segments = len(result.segments) if hasattr(result, 'segments') else None
    return Measured(statistics.median(maps), statistics.median(works), segments, peak)


def even(size, parts):
    """Widths of parts that differ by one element at most."""
    return [size // parts + (part < size % parts) for part in range(parts)]


def rows_to_columns(affine):
    """512 row shards to 8 column shards, as ``(target, source)``; ``affine`` is the module that makes the maps."""
    rows, columns = ROWS_COLUMNS
    return (affine.contiguous_split_map(ROWS_COLUMNS, even(columns, 8),
                                        1), affine.contiguous_split_map(ROWS_COLUMNS, even(rows, 512), 0))


def rows_to_uneven_rows(affine):
    """1024 row shards to 768, whose edges differ, as ``(target, source)``."""
    rows = ROWS_COLUMNS[0]
    return (affine.contiguous_split_map(ROWS_COLUMNS, even(rows, 768),
                                        0), affine.contiguous_split_map(ROWS_COLUMNS, even(rows, 1024), 0))


def zero3_to_columns(shape, ranks, parts):
    """ZeRO-3 partitions to column shards, as ``(target, source)``."""
    return contiguous_split_map(shape, even(shape[1], parts), 1), zero3_partition_map(shape, ranks)


def union_to_columns():
    """ZeRO-3 partitions beside 64 column shards, to 48 column shards, as ``(target, source)``."""
    ranks = 16384
    survivors = relabel(contiguous_split_map(UNEVEN, even(UNEVEN[1], 64), 1),
                        {part: ranks + part
                         for part in range(64)})
    union = union_affine_maps([zero3_partition_map(UNEVEN, ranks), survivors])
    return contiguous_split_map(UNEVEN, even(UNEVEN[1], 48), 1), union


class Table:
    """The rows as they are measured, and whether all that is required was found."""

    def __init__(self):
        self.rows = []
        self.met = True

    def add(self, parameter, what, planner, measured, requirement=None):
        print(f'  {what} ({planner})', file=sys.stderr, flush=True)
        shape = ' x '.join(map(str, parameter))
        self.rows.append((shape, what, planner, *_figures(measured), *_verdict(requirement)))
        self.met &= requirement is None or requirement.met

    def show(self, title):
        """Print the table, with rich where it is installed."""
        try:
            from rich.console import Console
            from rich.table import Table as RichTable
        except ImportError:
            print(title, _plain([COLUMNS, *self.rows]), sep='\n')
            return
        table = RichTable(title=title)
        for position, name in enumerate(COLUMNS):
            table.add_column(name, justify='left' if position < 3 else 'right', no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        # A table in a file or a pipe has no width of its own; nothing may be cut off there.
        Console(width=None if sys.stdout.isatty() else 240).print(table)


def _number(value):
    return f'{value:,.0f}' if value >= 100 else f'{value:.2f}'


def _figures(measured):
    if measured is None:
        return ('', '', '', '', '')
    seconds = ['' if value is None else f'{value:.4f}' for value in (measured.maps, measured.work)]
    if measured.segments is None:
        counts = ['', '']
    else:
        counts = [f'{measured.segments:,}', _number(measured.per_segment)]
    return (*seconds, *counts, '' if measured.peak is None else f'{measured.peak / 2**20:,.1f}')


def _verdict(requirement):
    return ('', '') if requirement is None else (requirement.shown, requirement.bound)


def _plain(rows):
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if column < 3 else cell.rjust(width)
                 for column, (cell, width) in enumerate(zip(row, widths))]  # yapf: disable
        lines.append('  '.join(cells).rstrip())
    return '\n'.join(lines)


def compare(table, what, build: Callable, upstream, why_not, runs, least):
    """Plan one pair of maps with both planners; ``least`` is how many times faster ours has to be."""
    measured = measure(lambda: build(affine), plan_transfer, runs)
    if upstream is None:
        table.add(ROWS_COLUMNS, what, f'none: {why_not}', None)
        table.add(ROWS_COLUMNS, what, OURS, measured, Requirement(None, 'x faster', least=least))
        return
    theirs, their_plan = upstream.plan_seconds(build)
    our_plan = plan_transfer(*build(affine))
    if [segment.to_dict() for segment in our_plan.segments] != [segment.to_dict() for segment in their_plan.segments]:
        raise SystemExit(f'{what}: the two planners made different copies, so their times do not compare')
    table.add(ROWS_COLUMNS, what, f'DeepSpeed {upstream.version}', theirs)
    table.add(ROWS_COLUMNS, what, OURS, measured, Requirement(theirs.work / measured.work, 'x faster', least=least))


def scale_out(table, runs):
    """ZeRO-3 partitions over more and more ranks: the time per segment must not grow with them."""
    first = None
    for ranks in (1024, 4096, 16384):
        measured = measure(lambda: zero3_to_columns(UNEVEN, ranks, 64), plan_transfer, runs)
        last = first is not None and ranks == 16384
        growth = measured.per_segment / first.per_segment if last else None
        requirement = Requirement(growth, 'x as at 1,024', most=2) if last else None
        first = first or measured
        table.add(UNEVEN, f'ZeRO-3 over {ranks:,} to 64 columns', OURS, measured, requirement)


def run(upstream, why_not, runs):
    """Measure everything; returns the table."""
    table = Table()
    compare(table, '512 rows to 8 columns', rows_to_columns, upstream, why_not, runs, least=200)
    compare(table, '1,024 rows to 768 rows', rows_to_uneven_rows, upstream, why_not, runs, least=500)
    scale_out(table, runs)
    measured = measure(lambda: (zero3_partition_map(UNEVEN, 16384), ), lambda layout: layout.validate_coverage(), runs)
    table.add(UNEVEN, 'validate_coverage of ZeRO-3 over 16,384', OURS, measured)
    measured = measure(lambda: zero3_to_columns(HUGE, 1000, 8), plan_transfer, runs)
    # Elements per allocated byte: anything that held one byte per element would bring it down to 1.
    spared = Requirement(HUGE[0] * HUGE[1] / measured.peak, 'elements/byte', least=1000)
    table.add(HUGE, 'ZeRO-3 over 1,000 to 8 columns', OURS, measured, spared)
    measured = measure(union_to_columns, plan_transfer, runs)
    table.add(UNEVEN, 'ZeRO-3 over 16,384 and 64 columns to 48 columns', OURS, measured)
    return table


def main(argv=None):
    parser = argparse.ArgumentParser(description='Measure what it costs to plan one parameter.')
    parser.add_argument('--check',
                        action='store_true',
                        help='exit with 1 where a requirement is missed or not measured')
    parser.add_argument('--runs', type=int, default=3, help='runs of our planner per row; the median is shown')
    parser.add_argument('--deepspeed-path', help='site-packages folder of a DeepSpeed that this Python does not see')
    options = parser.parse_args(argv)
    if options.runs < 1:
        parser.error('--runs must be 1 or more')
    upstream, why_not = find_upstream(options.deepspeed_path)
    table = run(upstream, why_not, options.runs)
    table.show('Planning one parameter (CPU seconds)')
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f'largest resident memory of the process: {kilobytes / 2**10:,.0f} MiB')
    if options.check and not table.met:
        print('a requirement was missed or not measured', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
