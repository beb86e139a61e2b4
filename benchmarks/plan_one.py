# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What it costs to plan one parameter, beside DeepSpeed's own planner where that is installed.

Times are CPU seconds of this process, so other programs on the machine do not enter, and a check compares only what
was measured in the same run. See README.md beside this file.
"""

import argparse
import resource
import statistics
import sys
import tracemalloc
from dataclasses import dataclass
from typing import Callable, Optional

from deepspeed.checkpoint import affine
from deepspeed.checkpoint.affine import contiguous_split_map, relabel, union_affine_maps, zero3_partition_map
from deepspeed.checkpoint.affine_transfer import plan_transfer
from peers import find_upstream
from tables import Requirement, Table, add_options, conclude, cpu_seconds, number
from workloads import even

OURS = 'ours'
COLUMNS = ('parameter', 'what', 'planner', 'maps s', 'work s', 'segments', 'us/segment', 'peak MiB')

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


class Results:
    """The rows as they are measured, and what is required of them."""

    def __init__(self):
        self.table = Table(COLUMNS, left=3)
        self.required = []

    def add(self, parameter, what, planner, measured, requirement=None):
        print(f'  {what} ({planner})', file=sys.stderr, flush=True)
        shape = ' x '.join(map(str, parameter))
        self.table.add(shape, what, planner, *_figures(measured))
        if requirement is not None:
            self.required.append((f'{shape}, {what}', requirement))


def _figures(measured):
    if measured is None:
        return ('', '', '', '', '')
    seconds = ['' if value is None else f'{value:.4f}' for value in (measured.maps, measured.work)]
    if measured.segments is None:
        counts = ['', '']
    else:
        counts = [f'{measured.segments:,}', number(measured.per_segment)]
    return (*seconds, *counts, '' if measured.peak is None else f'{measured.peak / 2**20:,.1f}')


def compare(results, what, build: Callable, upstream, why_not, runs, least):
    """Plan one pair of maps with both planners; ``least`` is how many times faster ours has to be."""
    measured = measure(lambda: build(affine), plan_transfer, runs)
    if upstream is None:
        results.add(ROWS_COLUMNS, what, f'none: {why_not}', None)
        results.add(ROWS_COLUMNS, what, OURS, measured, Requirement(None, 'x faster', least=least))
        return
    maps = build(upstream.affine)
    seconds, their_plan = cpu_seconds(lambda: upstream.plan(*maps))
    theirs = Measured(None, seconds, len(their_plan.segments), None)
    our_plan = plan_transfer(*build(affine))
    if [segment.to_dict() for segment in our_plan.segments] != [segment.to_dict() for segment in their_plan.segments]:
        raise SystemExit(f'{what}: the two planners made different copies, so their times do not compare')
    results.add(ROWS_COLUMNS, what, f'DeepSpeed {upstream.version}', theirs)
    results.add(ROWS_COLUMNS, what, OURS, measured, Requirement(theirs.work / measured.work, 'x faster', least=least))


def scale_out(results, runs):
    """ZeRO-3 partitions over more and more ranks: the time per segment must not grow with them."""
    first = None
    for ranks in (1024, 4096, 16384):
        measured = measure(lambda: zero3_to_columns(UNEVEN, ranks, 64), plan_transfer, runs)
        last = first is not None and ranks == 16384
        growth = measured.per_segment / first.per_segment if last else None
        requirement = Requirement(growth, 'x as at 1,024', most=2) if last else None
        first = first or measured
        results.add(UNEVEN, f'ZeRO-3 over {ranks:,} to 64 columns', OURS, measured, requirement)


def run(upstream, why_not, runs):
    """Measure everything; returns the results."""
    results = Results()
    compare(results, '512 rows to 8 columns', rows_to_columns, upstream, why_not, runs, least=200)
    compare(results, '1,024 rows to 768 rows', rows_to_uneven_rows, upstream, why_not, runs, least=500)
    scale_out(results, runs)
    measured = measure(lambda: (zero3_partition_map(UNEVEN, 16384), ), lambda layout: layout.validate_coverage(), runs)
    results.add(UNEVEN, 'validate_coverage of ZeRO-3 over 16,384', OURS, measured)
    measured = measure(lambda: zero3_to_columns(HUGE, 1000, 8), plan_transfer, runs)
    # Elements per allocated byte: anything that held one byte per element would bring it down to 1.
    spared = Requirement(HUGE[0] * HUGE[1] / measured.peak, 'elements/byte', least=1000)
    results.add(HUGE, 'ZeRO-3 over 1,000 to 8 columns', OURS, measured, spared)
    measured = measure(union_to_columns, plan_transfer, runs)
    results.add(UNEVEN, 'ZeRO-3 over 16,384 and 64 columns to 48 columns', OURS, measured)
    return results


def main(argv=None):
    parser = argparse.ArgumentParser(description='Measure what it costs to plan one parameter.')
    add_options(parser)
    parser.add_argument('--runs', type=int, default=3, help='runs of our planner per row; the median is shown')
    parser.add_argument('--deepspeed-path', help='site-packages folder of a DeepSpeed that this Python does not see')
    options = parser.parse_args(argv)
    if options.runs < 1:
        parser.error('--runs must be 1 or more')
    upstream, why_not = find_upstream(options.deepspeed_path)
    results = run(upstream, why_not, options.runs)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f'largest resident memory of the process: {kilobytes / 2**10:,.0f} MiB')
    return conclude(results.required, options, results.table, 'Planning one parameter (CPU seconds)')


if __name__ == '__main__':
    sys.exit(main())
