# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What it costs to move a model between processes, beside what the network can do and what people do today.

Everything is measured side by side in the same processes, in turns. See README.md beside this file.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import List, Optional

import torch
import torch.distributed as dist

from deepspeed.checkpoint.affine_transfer_executor import StagingBudget, TransferStats
from movers import Buffers, Executor, Job, random_bits
from moves import COPY, GATHERED, OURS, PACKED, RAW, REPLICAS, moves
from ranks import Peak, run_job, written
from tables import Requirement, Table, add_options, conclude, number

MIB = 1 << 20
COLUMNS = ('move', 'by', 's', 'GB/s', 'time / first', 'lowest', 'highest', 'CPU / first',
           'sends MiB', 'peak MiB')  # yapf: disable


@dataclass(frozen=True)
class Found:
    """What one process, or a job of several, found of one mover.

    Attributes:
        peak: most bytes above those before it was made, up to the end of its first transfer; of the process with most.
        seconds: of each turn; of the slowest process. cpu: CPU seconds of each turn; of all processes together.
        written: bytes given to the kernel in each turn; of the process with most. None where nobody counts them.
        stats: what the executor says of its last transfer, by process; else empty.
    """
    peak: Optional[int]
    seconds: List[float]
    cpu: List[float]
    written: List[Optional[int]]
    stats: List[TransferStats]

    def over(self, other, kind='seconds'):
        """This mover's time over another's, turn by turn."""
        return [one / base for one, base in zip(getattr(self, kind), getattr(other, kind))]

    @classmethod
    def of_job(cls, ranks):
        """All processes' figures as those of their job."""
        seconds, cpu, sent = (zip(*(getattr(rank, kind) for rank in ranks)) for kind in ('seconds', 'cpu', 'written'))
        return cls(most([rank.peak for rank in ranks]), list(map(max, seconds)), list(map(sum, cpu)),
                   list(map(most, sent)), [stats for rank in ranks for stats in rank.stats])


def most(figures):
    return None if None in figures else max(figures)


def measure(rank, device, move, runs):
    """What one process finds: ``Found`` of every mover by label, and the bytes that it sends (alone: copies)."""
    transfers, endpoints = move.build()
    buffers = [Buffers(side, transfers, endpoints, rank, device) for side in ('source', 'target')]
    job = Job(rank, device, transfers, endpoints, *buffers)
    bits = random_bits(transfers, device)
    job.sources.fill(bits)
    moved = job.plan.sent_bytes().get(rank, 0) if move.processes > 1 else job.plan.local_bytes()
    made, peaks = {}, {}
    for label, make in move.movers.items():
        job.targets.memory.zero_()
        peak = Peak(device)
        made[label] = make(job)
        timed(made[label], device)
        peaks[label] = peak.above()
        if label not in (RAW, PACKED, COPY):
            job.targets.check(bits, label)
    # In turns: what else this machine does, it does to all of them.
    turns = [{label: timed(mover, device) for label, mover in made.items()} for _ in range(runs)]
    return moved, {
        label:
        Found(peaks[label], *map(list, zip(*(turn[label] for turn in turns))),
              [mover.stats] if isinstance(mover, Executor) else [])
        for label, mover in made.items()
    }


def timed(mover, device):
    """Seconds, CPU seconds and bytes given to the kernel in one transfer, which all processes begin together."""
    if dist.is_initialized():
        dist.barrier()
    synchronize(device)
    before, began, cpu = written(), time.perf_counter(), time.process_time()
    mover()
    synchronize(device)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    # Accelerators' networks pass the kernel by.
    return seconds, cpu, None if before is None or device.type != 'cpu' else written() - before


def synchronize(device):
    if device.type != 'cpu':
        getattr(torch, device.type).synchronize(device)


class Report:
    """Runs the moves and keeps what they found."""

    def __init__(self, runs, backend, device):
        self._runs, self._backend, self._device = runs, backend, device
        self.table = Table(COLUMNS, left=2)
        self.required, self.notes = [], []

    def run(self, key, move):
        """Measure a move and say what must hold of it."""
        print(f'  {move.title}', file=sys.stderr, flush=True)
        moved, ranks = zip(*run_job(move.processes, self._backend, self._device, measure, move, self._runs))
        found, moved = {label: Found.of_job([rank[label] for rank in ranks]) for label in move.movers}, sum(moved)
        base = next(iter(found.values()))
        for label, one in found.items():
            self.table.add(move.title, label, *cells(one, base, moved))
            self._tell(move, label, one, moved)
        self.required += [(f'{move.title}: {what}', requirement) for what, requirement in REQUIRED[key](found, moved)]

    def _tell(self, move, label, found, moved):
        """Where the time of our movers goes."""
        for rank, stats in enumerate(found.stats):
            phases = ', '.join(f'{phase} {took:.3f}' for phase, took in stats.seconds.items() if took >= 0.0005)
            self.notes.append(f'{move.title}, {label}, process {rank}: {phases} s; {stats.rounds} rounds, '
                              f'{stats.packed_bytes / MIB:,.0f} MiB packed')
        if move.processes == 1:
            rate = 2 * moved / statistics.median(found.seconds) / 1e9
            self.notes.append(f'{move.title}, {label}: {rate:,.1f} GB/s of memory on {self._device}, reads and writes')


def cells(found, base, moved):
    """The figures of a row."""
    seconds, ratios = statistics.median(found.seconds), found.over(base)
    memory = ['' if figure is None else f'{figure / MIB:,.0f}' for figure in (found.written[-1], found.peak)]
    return (f'{seconds:.3f}', f'{moved / seconds / 1e9:.2f}', number(statistics.median(ratios)), number(min(ratios)),
            number(max(ratios)), number(statistics.median(found.over(base, 'cpu'))), *memory)


def near_raw(found, moved, most):
    """Near to what the network can do, which moves the same bytes."""
    if sum(stats.sent_bytes for stats in found[OURS].stats) != moved:
        raise SystemExit('the executor and send/recv move different bytes')
    yield 'over send/recv', Requirement(statistics.median(found[OURS].over(found[RAW])), 'x its time', most=most)
    yield from bounded(found, moved)


def faster(found, moved, most):
    """That, and far from what people do."""
    yield from near_raw(found, moved, most)
    ratio = statistics.median(found[GATHERED].over(found[OURS]))
    yield f'than {GATHERED}', Requirement(ratio, 'x faster', least=6)


def bounded(found, _):
    """Memory within the staging cap and a tenth."""
    peak, cap = found[OURS].peak, StagingBudget().bytes_per_process
    yield 'peak', Requirement(None if peak is None else peak / MIB, 'MiB', most=round(1.1 * cap / MIB, 1))


def once(found, moved):
    """Bytes leave the trainer once; ``moved`` are those of all replicas."""
    sent = found[OURS].written[-1] or found[OURS].stats[0].sent_bytes
    yield 'what leaves the busiest process', Requirement(sent * REPLICAS / moved, 'x the model', most=1.05)
    yield from bounded(found, moved)


def like_a_copy(found, _):
    yield 'speed', Requirement(statistics.median(found[COPY].over(found[OURS])), 'x copy_', least=0.7)


# By the short names of the moves.
REQUIRED = {
    'llama': partial(faster, most=1.35),
    'rows': partial(faster, most=1.15),
    'large': partial(faster, most=1.35),
    'small': partial(near_raw, most=2),
    'replicas': once,
    'dtensor': bounded,
    'slices': like_a_copy,
    'whole': like_a_copy,
}


def main(argv=None):
    parser = argparse.ArgumentParser(description='Measure what it costs to move a model between processes.')
    add_options(parser)
    parser.add_argument('--runs', type=int, default=7, help='turns of all movers (default 7)')
    parser.add_argument('--moves', nargs='+', choices=list(REQUIRED), default=list(REQUIRED), help='only these')
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu', help='where the buffers are')
    parser.add_argument('--backend', choices=('gloo', 'nccl'), default='gloo', help='of the process group')
    options = parser.parse_args(argv)
    if options.runs < 1:
        parser.error('--runs must be 1 or more')
    if options.backend == 'nccl' and options.device != 'cuda':
        parser.error('nccl moves what is on GPUs: add --device cuda')
    devices = torch.cuda.device_count()
    if options.device == 'cuda' and not devices:
        print('skipped: there is no GPU here')
        return 0
    report, known = Report(options.runs, options.backend, options.device), moves()
    for key in options.moves:
        if options.device == 'cuda' and known[key].processes > devices:
            report.notes.append(f'{known[key].title}: skipped, it takes {known[key].processes} GPUs, and {devices} '
                                'are here')
        else:
            report.run(key, known[key])
    print(*report.notes, sep='\n')
    return conclude(report.required, options, report.table, 'Moving models')


if __name__ == '__main__':
    sys.exit(main())
