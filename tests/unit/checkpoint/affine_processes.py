# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Run a function in several real processes, and show the first failure rather than the others' timeouts.

Example::

    def work(world, factor):
        world.init_default_group()
        return world.rank * factor

    def test_work():
        assert run_processes(2, work, 10) == [0, 10]
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Callable, Dict, List

import torch
import torch.distributed as dist

# How long the others may still take after one process failed: their words may explain the failure.
GRACE = 10.0
STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class World:
    """What a worker knows of the others.

    Args:
        rank: this process; size: all of them.
        port: of a store server in the test's own process, which outlives every worker.
    """
    rank: int
    size: int
    port: int

    def store(self, name: str):
        """A store that all workers share, and which is empty under this name."""
        client = dist.TCPStore('127.0.0.1', self.port, None, False, STORE_TIMEOUT)
        return dist.PrefixStore(name, client)

    def init_default_group(self, name: str = 'default', rank: int = None, size: int = None, timeout: float = 60):
        """Make the default group over gloo, of all workers or of some of them."""
        dist.init_process_group('gloo',
                                store=self.store(name),
                                rank=self.rank if rank is None else rank,
                                world_size=self.size if size is None else size,
                                timeout=timedelta(seconds=timeout))


def run_processes(size: int, function: Callable, *args, timeout: float = 120, may_die: Collection = ()) -> List:
    """Run ``function(world, *args)`` in ``size`` processes.

    Args:
        size: how many.
        function: of a module, so that it can be found by name; its result must pickle.
        timeout: seconds until all are killed.
        may_die: ranks whose violent end is part of the test; their result is None.

    Returns:
        The results by rank.

    Raises:
        AssertionError: a process failed, died or was late, with the traceback of the one that did so first.
    """
    server = dist.TCPStore('127.0.0.1', 0, None, True, STORE_TIMEOUT, wait_for_workers=False)
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['torch', 'torch.distributed', 'numpy'])
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(size):
            world = World(rank, size, server.port)
            processes.append(context.Process(target=_work, args=(folder, world, function, args), daemon=True))
        for process in processes:
            process.start()
        try:
            late = _watch(processes, Path(folder), timeout, may_die)
        finally:
            _end_all(processes)
        return _results(processes, Path(folder), late, may_die)


def _work(folder: str, world: World, function: Callable, args) -> None:
    torch.set_num_threads(1)
    log = open(Path(folder, f'stack-{world.rank}'), 'w')
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    try:
        _leave(folder, f'result-{world.rank}', pickle.dumps(function(world, *args)))
        code = 0
    except BaseException:
        _leave(folder, f'error-{world.rank}', pickle.dumps((time.monotonic(), traceback.format_exc())))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through interpreter shutdown: its threads may abort a process whose work is done.
    os._exit(code)


def _leave(folder: str, name: str, data: bytes) -> None:
    """Write a file that is either whole or not there."""
    draft = Path(folder, name + '.draft')
    draft.write_bytes(data)
    draft.rename(Path(folder, name))


def _watch(processes: List, folder: Path, timeout: float, may_die: Collection) -> Dict[int, str]:
    """Wait for all; after a failure, for a while. Returns the stacks of those that did not end."""
    deadline = time.monotonic() + timeout
    failed = False
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if not failed and any(process.exitcode and rank not in may_die for rank, process in enumerate(processes)):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.01)
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in late:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    if late:
        time.sleep(0.5)
    stacks = {rank: folder / f'stack-{rank}' for rank in late}
    return {rank: path.read_text() if path.exists() else '' for rank, path in stacks.items()}


def _end_all(processes: List) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _results(processes: List, folder: Path, late: Dict[int, str], may_die: Collection) -> List:
    ranks = range(len(processes))
    errors = []
    for rank in ranks:
        path = folder / f'error-{rank}'
        if path.exists():
            errors.append(pickle.loads(path.read_bytes()) + (rank, ))
    if errors:
        _, text, rank = min(errors)
        raise AssertionError(f'process {rank} of {len(processes)} failed first:\n{text}')
    results = {rank: folder / f'result-{rank}' for rank in ranks}
    died = [rank for rank in ranks if rank not in late and rank not in may_die and not results[rank].exists()]
    if died:
        codes = {rank: processes[rank].exitcode for rank in died}
        raise AssertionError(f'processes died without a word, by exit code: {codes}')
    if late:
        shown = '\n'.join(f'process {rank}:\n{stack}' for rank, stack in late.items())
        raise AssertionError(f'processes {sorted(late)} did not end in time:\n{shown}')
    return [pickle.loads(path.read_bytes()) if path.exists() else None for path in results.values()]
