# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Turn a ZeRO-3 checkpoint into safetensors: time and memory of `ds_affine reshard` beside DeepSpeed's own script.

Needs DeepSpeed. See README.md beside this file.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tables import Requirement, Table, add_options, conclude

MIB = 1 << 20
RANKS = 4
# A layer has 25 million elements: 96 MiB in float32, which ZeRO keeps for a model in bfloat16.
HIDDEN, INNER = 1536, 6144
COLUMNS = ('from 4 ZeRO-3 ranks', 'by', 's', 'time / first', 'lowest', 'highest', 'peak private MiB')
SPLITS = ('--split', r'\.(q|up)_proj\.=0', '--split', r'\.(o|down)_proj\.=1')


@dataclass(frozen=True)
class Found:
    """Seconds and most private memory (bytes) of one run."""
    seconds: float
    peak: int


def save(folder, layers):
    """Have DeepSpeed save a model of so many layers from RANKS processes."""
    environment = dict(os.environ, DS_ACCELERATOR='cpu', OMP_NUM_THREADS='1')
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={RANKS}']
    subprocess.run([*command, __file__, '--rank-of',
                    str(folder), '--layers', str(layers)],
                   check=True,
                   env=environment,
                   stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)


def save_as_rank(folder, layers):
    """What each of those processes does."""
    import deepspeed
    import torch
    # Its shared-memory collectives would be compiled first.
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo')
    settings = {
        'train_micro_batch_size_per_gpu': 1,
        'zero_allow_untested_optimizer': True,
        'zero_force_ds_cpu_optimizer': False,
        'zero_optimization': {
            'stage': 3
        },
        'bf16': {
            'enabled': True
        }
    }
    sizes = {'q_proj': (HIDDEN, HIDDEN), 'o_proj': (HIDDEN, HIDDEN), 'up_proj': (HIDDEN, INNER),
             'down_proj': (INNER, HIDDEN)}  # yapf: disable
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = torch.nn.ModuleList(
            torch.nn.ModuleDict({
                name: torch.nn.Linear(*size, bias=False)
                for name, size in sizes.items()
            }) for _ in range(layers))
    engine, *_ = deepspeed.initialize(model=model,
                                      optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                                      config=settings)
    engine.save_checkpoint(folder, tag='step')
    torch.distributed.barrier()
    os._exit(0)


def run(command):
    """Run a command to its end; what it wrote is on disk then."""
    began = time.perf_counter()
    process = subprocess.Popen(command,
                               env=dict(os.environ, DS_ACCELERATOR='cpu'),
                               stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    peaks = [0]
    watcher = threading.Thread(target=_watch, args=(process, peaks))
    watcher.start()
    if process.wait():
        raise SystemExit(f'{command} failed')
    seconds = time.perf_counter() - began
    watcher.join()
    return Found(seconds, max(peaks))


def _watch(process, peaks):
    while process.poll() is None:
        peaks.append(_private(process.pid))
        time.sleep(0.01)


def _private(pid):
    """Bytes of memory that are no file's."""
    try:
        status = Path(f'/proc/{pid}/status').read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith('RssAnon'))
    except (OSError, StopIteration):
        return 0


def sync(folder):
    """Bring a folder's files to disk, as `reshard` does by itself."""
    began = time.perf_counter()
    for path in folder.iterdir():
        with open(path, 'rb') as file:
            os.fsync(file.fileno())
    return time.perf_counter() - began


def measure(work, layers, runs):
    """`Found` of every way, by name, for each run. All read the same files, which the kernel has in memory."""
    source = work / 'checkpoint'
    save(source, layers)
    ours = [sys.executable, '-m', 'ds_affine', 'reshard', str(source)]
    ways = {
        'zero_to_fp32.py':
        [sys.executable, str(source / 'zero_to_fp32.py'),
         str(source), 'OUT', '--safe_serialization'],
        'ds_affine reshard --to hf': [*ours, 'OUT', '--to', 'hf'],
        'ds_affine reshard --to tp-4': [*ours, 'OUT', '--to', 'tp-4', *SPLITS],
    }
    found = {way: [] for way in ways}
    for turn in range(runs):
        for number, (way, command) in enumerate(ways.items()):
            target = work / f'out{number}'
            shutil.rmtree(target, ignore_errors=True)
            one = run([str(target) if word == 'OUT' else word for word in command])
            extra = sync(target) if not number else 0.0
            found[way].append(Found(one.seconds + extra, one.peak))
    for number in (1, 2):
        if subprocess.run(
            [sys.executable, '-m', 'ds_affine', 'verify',
             str(work / 'out0'),
             str(work / f'out{number}')],
                stdout=subprocess.DEVNULL).returncode:
            raise SystemExit('the ways have written different parameters')
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description='Measure what it costs to turn a ZeRO-3 checkpoint into safetensors.')
    add_options(parser)
    parser.add_argument('--runs', type=int, default=3, help='turns of all ways (default 3)')
    parser.add_argument('--layers', type=int, default=23, help='96 MiB each (default 23, 2.2 GiB)')
    parser.add_argument('--folder', help='where to put the files (default: that for temporary ones)')
    parser.add_argument('--rank-of', help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank_of:
        save_as_rank(options.rank_of, options.layers)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(Path(folder), options.layers, options.runs)
    table = Table(COLUMNS, left=2)
    theirs, whole, shards = found.values()
    for way, runs in found.items():
        ratios = [one.seconds / base.seconds for one, base in zip(runs, theirs)]
        table.add(f'{options.layers * 96 / 1024:.1f} GiB', way,
                  f'{statistics.median(one.seconds for one in runs):.2f}', f'{statistics.median(ratios):.2f}',
                  f'{min(ratios):.2f}', f'{max(ratios):.2f}', f'{max(one.peak for one in runs) / MIB:,.0f}')
    faster = statistics.median(base.seconds / one.seconds for one, base in zip(whole, theirs))
    slower = statistics.median(one.seconds / base.seconds for one, base in zip(shards, whole))
    required = [('one folder, than zero_to_fp32.py', Requirement(faster, 'x faster', least=1.5)),
                ('one folder, peak', Requirement(max(one.peak for one in whole) / 1e6, 'MB', most=500)),
                ('TP-4 shards, than one folder', Requirement(slower, 'x its time', most=1.1))]
    return conclude(required, options, table, 'ZeRO-3 checkpoint to safetensors')


if __name__ == '__main__':
    sys.exit(main())
