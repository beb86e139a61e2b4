# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What it costs to plan whole models, beside DeepSpeed's planner and torch's own resharding planner.

Every row is measured in a Python process of its own, one after the other, in CPU seconds. See README.md beside this
file.
"""

import argparse
import json
import multiprocessing
import pathlib
import re
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Callable, Optional

import numpy as np
import torch

import workloads
from deepspeed.checkpoint.affine_transfer import plan_transfer, plan_transfers
from peers import distinct, find_upstream, read_calls
from tables import Requirement, Table, add_options, conclude, cpu_seconds, number

MODELS = pathlib.Path(__file__).resolve().parents[2] / 'shared' / 'models'
LLAMA_8B, LLAMA_70B, DEEPSEEK = 'llama-3-8b', 'llama-3-70b', 'deepseek-v3'
# The run of a ZeRO-3 rank has one form at all of SCALES: whole rows, or rows with parts of rows on both sides.
WHOLE_ROWS, PARTS_OF_ROWS = (16384, 8192), (262139, 8189)
SCALES = (256, 1024, 4096, 16384)
# Where a peer's calls differ within one parameter, this many of them are measured, at even distances.
MEASURED_CALLS = 8
ALL, TRAINER, ROLLOUT = 'all', 'a trainer', 'a rollout'
COLUMNS = ('model', 'move', 'processes', 'planner', 'maps s', 'plan s', 'peak MB', 'segments', 'us/segment',
           'ours is faster', 'measured on')  # yapf: disable


@dataclass(frozen=True)
class Workload:
    """One move of one model.

    Attributes:
        model: its name. parameters: name to shape.
        move: what moves, in words.
        build: makes ``(transfers, endpoints)`` from the parameters.
        trainers, readers: processes that hold the source, and that want the target. Each has one location.
        every_call: whether peers are measured on every call, not only on distinct ones.
    """
    model: str
    parameters: dict
    move: str
    build: Callable
    trainers: int
    readers: int
    every_call: bool = False

    def process(self, kind):
        """The one whose plan is made, in the middle of its kind, where nothing is special; None for all."""
        return {ALL: None, TRAINER: self.trainers // 2, ROLLOUT: self.trainers + self.readers // 2}[kind]

    def location(self, kind):
        """The target location of that process; None for all."""
        return None if kind == ALL else self.process(kind) - self.trainers


@dataclass(frozen=True)
class Figures:
    """What came out of one row; bytes, CPU seconds, and None where there is nothing to say.

    Attributes:
        measured, calls: a peer's calls that were measured, and those that the model needs.
        busiest, bound: bytes that the busiest sender sends, and what some sender must send.
        refusal: why a peer made no plan.
    """
    maps: Optional[float] = None
    plan: Optional[float] = None
    peak: Optional[int] = None
    segments: Optional[int] = None
    measured: Optional[int] = None
    calls: Optional[int] = None
    busiest: Optional[int] = None
    bound: Optional[int] = None
    refusal: Optional[str] = None

    @property
    def seconds(self):
        return self.maps + self.plan

    @property
    def per_segment(self):
        """Microseconds per segment, maps included where they were timed."""
        return ((self.maps or 0.0) + self.plan) / self.segments * 1e6


def in_fresh_process(work, *arguments):
    """The result of a call in a Python process of its own, where nothing is left of any other row."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('spawn')) as pool:
        return pool.submit(work, *arguments).result()


def resident(kind):
    """Resident bytes of this process: ``VmRSS`` now, ``VmHWM`` at most so far; None where there is no /proc.

    ``getrusage`` does not do: a process starts with the peak of the one that it was forked from.
    """
    try:
        status = pathlib.Path('/proc/self/status').read_text()
    except OSError:
        return None
    return int(re.search(rf'{kind}:\s+(\d+) kB', status)[1]) * 1024


def peak_above(start):
    return None if start is None else resident('VmHWM') - start


def our_figures(workload, process, policy):
    """Make the maps and the plan once, as a process does that has only just started."""
    # numpy imports part of itself when this is first called, and imports are not what is measured.
    np.unique(np.arange(2))
    start = resident('VmRSS')
    maps, (transfers, endpoints) = cpu_seconds(lambda: workload.build(workload.parameters))
    seconds, plan = cpu_seconds(
        lambda: plan_transfers(transfers, endpoints=endpoints, process=process, replica_policy=policy))
    peak = peak_above(start)
    busiest = max(plan.sent_bytes().values())
    bound = plan.balance.lower_bound_bytes if plan.balance else None
    return Figures(maps, seconds, peak, plan.segments, busiest=busiest, bound=bound)


def torch_figures(workload, kind):
    """What torch's planner takes to find what all target locations read, or only one in the middle of them."""
    transfers, _ = workload.build(workload.parameters)
    groups = read_calls(transfers, workload.location(kind))
    start = resident('VmRSS')
    kept, seconds, segments, measured = [], 0.0, 0.0, 0
    for calls in groups:
        chosen = calls if workload.every_call else spread(calls, MEASURED_CALLS)
        share = sum(call.times for call in calls) / sum(call.times for call in chosen)
        for call in chosen:
            repeats = call.times if workload.every_call else 1
            for _ in range(repeats):
                taken, items = call.measure()
                seconds += taken * share * call.times / repeats
                segments += len(items) * share * call.times / repeats
                if workload.every_call:
                    kept.append(items)
            measured += repeats
    calls = sum(call.times for group in groups for call in group)
    peak = peak_above(start) if workload.every_call else None
    return Figures(None, seconds, peak, round(segments), measured, calls)


def spread(entries, count):
    """At most ``count`` entries at even distances."""
    if len(entries) <= count:
        return entries
    return [entries[place * len(entries) // count] for place in range(count)]


def deepspeed_figures(workload, folder):
    """What DeepSpeed's planner takes for the whole model; it knows neither one process nor equal parameters."""
    upstream, why_not = find_upstream(folder)
    if upstream is None:
        return Figures(refusal=why_not)
    transfers, _ = workload.build(workload.parameters)
    pairs = [(upstream.map_of(entry.target_map), upstream.map_of(entry.source_map), entry, members)
             for entry, members in distinct(transfers)]
    start = resident('VmRSS')
    kept, seconds, segments, measured = [], 0.0, 0, 0
    for target, source, entry, members in pairs:
        repeats = members if workload.every_call else 1
        for _ in range(repeats):
            try:
                taken, plan = cpu_seconds(lambda: upstream.plan(target, source))
            except upstream.transfer.AffineTransferError as error:
                return Figures(refusal=f'refuses: {error}')
            seconds += taken * members / repeats
            kept.append(plan)
        measured += repeats
        segments += len(plan.segments) * members
    peak = peak_above(start) if workload.every_call else None
    require_same_copies(pairs, upstream)
    return Figures(None, seconds, peak, segments, measured, len(transfers))


def require_same_copies(pairs, upstream):
    """Stop where the planners make different copies, for then their times do not compare."""
    for target, source, entry, _ in pairs:
        theirs, ours = upstream.plan(target, source), plan_transfer(entry.target_map, entry.source_map)
        if [segment.to_dict() for segment in theirs.segments] != [segment.to_dict() for segment in ours.segments]:
            raise SystemExit(f'{entry.target_map.logical_shape}: DeepSpeed and we make different copies')


class Report:
    """Runs the rows and keeps their figures by workload, processes and planner."""

    def __init__(self, runs, deepspeed_path):
        self.runs, self.deepspeed_path = runs, deepspeed_path
        self.table = Table(COLUMNS, left=4)
        self.notes = []

    def ours(self, workload, kind=ALL, policy='local_first_least_loaded', label='ours'):
        """The median of some runs."""
        self._tell(workload, kind, label)
        found = [in_fresh_process(our_figures, workload, workload.process(kind), policy) for _ in range(self.runs)]
        peaks = [figures.peak for figures in found]
        figures = Figures(maps=statistics.median(one.maps for one in found),
                          plan=statistics.median(one.plan for one in found),
                          peak=None if None in peaks else max(peaks),
                          segments=found[0].segments,
                          busiest=found[0].busiest,
                          bound=found[0].bound)
        self._add(workload, kind, label, figures)
        return figures

    def torch(self, workload, ours, kind=ALL):
        label = f'torch {torch.__version__.split("+")[0]}'
        self._tell(workload, kind, label)
        figures = in_fresh_process(torch_figures, workload, kind)
        self._add(workload, kind, label, figures, ours)
        return figures

    def deepspeed(self, workload, ours):
        self._tell(workload, ALL, 'DeepSpeed')
        figures = in_fresh_process(deepspeed_figures, workload, self.deepspeed_path)
        self._add(workload, ALL, 'DeepSpeed', figures, ours)
        return figures

    def _tell(self, workload, kind, label):
        print(f'  {workload.model}, {workload.move}, {kind} ({label})', file=sys.stderr, flush=True)

    def _add(self, workload, kind, label, figures, ours=None):
        self.table.add(workload.model, workload.move, kind, label, *cells(figures, ours))


def cells(figures, ours):
    """The figures of a row; a peer's beside ours."""
    if figures.refusal:
        return ('', '', '', '', '', '', shortened(figures.refusal, 60))
    seconds = ['' if value is None else f'{value:.4f}' for value in (figures.maps, figures.plan)]
    peak = '' if figures.peak is None else f'{figures.peak / 1e6:,.1f}'
    faster = '' if ours is None else f'{number(figures.plan / ours.seconds)} x'
    sample = '' if figures.calls is None else f'{figures.measured:,} of {figures.calls:,} calls'
    return (*seconds, peak, f'{figures.segments:,}', number(figures.per_segment), faster, sample)


def shortened(text, length):
    """The first words of a text."""
    return text if len(text) <= length else text[:length].rsplit(' ', 1)[0] + ' ...'


def read_models(folder):
    """Name to shape for each of the models."""
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise SystemExit(f'there is no folder {folder}: pass --models DIR, a folder with one JSON file per model that '
                         'holds {"parameters": {name: shape}}')
    return lambda name: json.loads((folder / f'{name}.json').read_text())['parameters']


def moves(parameters_of):
    """The five models, as ``Workload``, by a short name."""
    zero3_to_tp, rows_to_tp, to_experts = (workloads.zero3_to_tp, workloads.rows_to_tp, workloads.zero3_to_experts)
    listed = {
        'qwen': ('qwen2.5-0.5b', 'ZeRO-3 8 -> TP-2', partial(zero3_to_tp, ranks=8, tp=2), 8, 2),
        'llama-8b': (LLAMA_8B, 'ZeRO-3 64 -> TP-8', partial(zero3_to_tp, ranks=64, tp=8), 64, 8),
        'rows': (LLAMA_8B, 'rows 64 -> TP-16', partial(rows_to_tp, ranks=64, tp=16), 64, 16),
        'llama-70b': (LLAMA_70B, 'ZeRO-3 512 -> TP-8', partial(zero3_to_tp, ranks=512, tp=8), 512, 8),
        'qwen-moe': ('qwen3-30b-a3b', 'ZeRO-3 256 -> TP-4 x EP-8', partial(to_experts, ranks=256, tp=4,
                                                                           ep=8), 256, 32),
        'deepseek': (DEEPSEEK, 'ZeRO-3 2048 -> TP-8 x EP-32', partial(to_experts, ranks=2048, tp=8, ep=32), 2048, 256),
    }
    return {
        key: Workload(model, parameters_of(model), move, build, *processes, every_call=key == 'rows')
        for key, (model, move, build, *processes) in listed.items()
    }


def measure_models(report, parameters_of):
    """All rows of the models; returns what must hold, as pairs of words and ``Requirement``."""
    found = {}
    for key, workload in moves(parameters_of).items():
        found[key, ALL] = everyone = report.ours(workload)
        found[key, 'torch'] = report.torch(workload, everyone)
        found[key, 'deepspeed'] = report.deepspeed(workload, everyone)
        found[key, TRAINER] = report.ours(workload, TRAINER)
        found[key, ROLLOUT] = rollout = report.ours(workload, ROLLOUT)
        report.torch(workload, rollout, ROLLOUT)
    if rollout.peak is not None:
        report.notes.append(f'{workload.model}, {workload.move}, a rollout: {rollout.per_segment:.3f} us and '
                            f'{rollout.peak / rollout.segments:.1f} bytes per segment')
    return [*faster(found), *llama_limits(found), *deepseek_limits(found)]


def faster(found):
    ours = found['rows', ALL]
    for peer, least in (('torch', 30), ('deepspeed', 500)):
        theirs = found['rows', peer]
        ratio = None if theirs.refusal else theirs.plan / ours.seconds
        yield f'{LLAMA_8B}, rows 64 -> TP-16: than {peer}', Requirement(ratio, 'x faster', least=least)


def llama_limits(found):
    for kind in (TRAINER, ROLLOUT):
        figures = found['llama-70b', kind]
        yield f'{LLAMA_70B}, 512 -> TP-8: {kind}, maps and plan', Requirement(figures.seconds, 's', most=0.25)
        yield f'{LLAMA_70B}, 512 -> TP-8: {kind}, peak', Requirement(megabytes(figures.peak), 'MB', most=200)
    seconds = found['llama-70b', ALL].seconds
    yield f'{LLAMA_70B}, 512 -> TP-8: all 520, maps and plan', Requirement(seconds, 's', most=10)


def deepseek_limits(found):
    trainer = found['deepseek', TRAINER]
    yield f'{DEEPSEEK}, 2048 -> TP-8 x EP-32: a trainer, maps and plan', Requirement(trainer.seconds, 's', most=2)
    yield f'{DEEPSEEK}, 2048 -> TP-8 x EP-32: a trainer, peak', Requirement(megabytes(trainer.peak), 'MB', most=500)


def megabytes(size):
    return None if size is None else size / 1e6


def measure_scales(report):
    """One parameter over more and more ranks; returns what must hold."""
    required = []
    for shape in (WHOLE_ROWS, PARTS_OF_ROWS):
        moves = [columns_of(shape, ranks) for ranks in SCALES]
        found = []
        for workload in moves:
            found.append(report.ours(workload))
            if shape == PARTS_OF_ROWS:
                report.torch(workload, found[-1])
        cost = [(many.seconds - few.seconds) / (many.segments - few.segments) * 1e6
                for few, many in zip(found, found[1:])]  # yapf: disable
        steps = ', '.join(f'{value:.3f}' for value in cost)
        report.notes.append(f'{workload.model}: each further segment costs {steps} us in the steps between '
                            f'{", ".join(map(str, SCALES))} ranks')
        required.append((f'{workload.model}, {SCALES[0]} to {SCALES[-1]} ranks: each further segment, dearest step',
                         Requirement(max(cost) / min(cost), 'x the cheapest', most=2)))
    report.deepspeed(workload, found[-1])
    for kind in (TRAINER, ROLLOUT):
        report.ours(workload, kind)
    return required


def columns_of(shape, ranks):
    return Workload(f'one of {shape[0]} x {shape[1]}', {'weight': shape}, f'ZeRO-3 {ranks} -> 64 columns',
                    partial(workloads.zero3_to_columns, ranks=ranks, parts=64), ranks, 64)


def measure_senders(report, parameters_of):
    """How evenly replicas share the sending; returns what must hold."""
    required = []
    for move, build, trainers in (
        ('8 copies -> TP-64', partial(workloads.copies_to_tp, copies=8, tp=64), 8),
        ('ZeRO-3 8, 8 copies -> TP-64', partial(workloads.hybrid_to_tp, ranks=8, copies=8, tp=64), 64),
    ):
        workload = Workload(LLAMA_8B, parameters_of(LLAMA_8B), move, build, trainers, 64)
        balanced = report.ours(workload, policy='balanced', label='ours, balanced')
        local = report.ours(workload, label='ours, local_first')
        for policy, figures, most in (('local_first_least_loaded', local, 1.05), ('balanced', balanced, 1.01)):
            requirement = Requirement(figures.busiest / balanced.bound, 'x the bound', most=most)
            required.append((f'{LLAMA_8B}, {move}: busiest sender, {policy}', requirement))
    return required


def main(argv=None):
    parser = argparse.ArgumentParser(description='Measure what it costs to plan whole models.')
    add_options(parser)
    parser.add_argument('--runs', type=int, default=3, help='runs of our planner per row; the median is shown')
    parser.add_argument('--models', default=MODELS, help=f'folder of the parameter tables (default: {MODELS})')
    parser.add_argument('--deepspeed-path', help='site-packages folder of a DeepSpeed that this Python does not see')
    options = parser.parse_args(argv)
    if options.runs < 1:
        parser.error('--runs must be 1 or more')
    parameters_of = read_models(options.models)
    report = Report(options.runs, options.deepspeed_path)
    required = [
        *measure_models(report, parameters_of), *measure_scales(report), *measure_senders(report, parameters_of)
    ]
    print(*report.notes, sep='\n')
    return conclude(required, options, report.table, 'Planning whole models (CPU seconds)')


if __name__ == '__main__':
    sys.exit(main())
