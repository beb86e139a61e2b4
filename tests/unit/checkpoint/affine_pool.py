# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Worker processes that stay alive for many calls, where starting new ones for each would take most of the time.

A worker that is killed is replaced before the next call; after a failure all are.

Example::

    def work(world, turn, factor):
        with join_transfer_group(world.store(turn), world.rank, world.size):
            return world.rank * factor

    with Pool(2) as pool:
        assert pool.run(work, 10) == [0, 10]
"""

import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch
import torch.distributed as dist

from affine_processes import GRACE, STORE_TIMEOUT, World
from deepspeed.checkpoint.affine_transfer_executor import join_transfer_group

# Seconds to wait for a group that a test has not yet done anything odd to.
PATIENCE = 120.0
# How a call of one worker ended.
DONE, FAILED, DIED, LATE = 'done', 'failed', 'died', 'late'


@dataclass(frozen=True)
class Worker:
    """A process, the end of its pipe that is here, and the file in which it can leave its stack."""
    process: Any
    connection: Connection
    log: Path


class Pool:
    """Processes that call a function together, as often as they are asked to.

    Args:
        size: how many.
    """

    def __init__(self, size: int):
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        self._workers: List[Optional[Worker]] = [None] * size
        self._server = None
        self._turns = 0

    def __enter__(self) -> 'Pool':
        return self

    def __exit__(self, *_) -> None:
        self._end_all()
        self._folder.cleanup()

    def run(self, function: Callable, *args, may_die: Collection = (), timeout: float = 120) -> List:
        """The results of ``function(world, turn, *args)``, by rank.

        Args:
            function: of a module, so that it can be found by name; its result must pickle. ``turn`` is a name that no
                other call has.
            may_die: ranks whose violent end is part of the test; their result is None.
            timeout: seconds until all are killed.

        Raises:
            AssertionError: a process failed, died or was late, with the traceback of the one that did so first.
        """
        self._start_missing()
        self._turns += 1
        job = pickle.dumps((f'turn {self._turns}', function, args))
        for worker in self._workers:
            worker.connection.send_bytes(job)
        outcomes = self._outcomes(timeout, may_die)
        bad = {rank: outcome for rank, outcome in outcomes.items() if outcome[0] != DONE}
        for rank in bad:
            self._end(rank)
        if all(kind == DIED and rank in may_die for rank, (kind, _) in bad.items()):
            return [None if rank in bad else pickle.loads(outcomes[rank][1]) for rank in range(self.size)]
        self._end_all()
        raise AssertionError(_account(bad))

    def _start_missing(self) -> None:
        context = multiprocessing.get_context('forkserver')
        context.set_forkserver_preload(['torch', 'torch.distributed', 'numpy'])
        if self._server is None:
            self._server = dist.TCPStore('127.0.0.1', 0, None, True, STORE_TIMEOUT, wait_for_workers=False)
        for rank in [rank for rank, worker in enumerate(self._workers) if worker is None]:
            ours, theirs = context.Pipe()
            log = Path(self._folder.name, f'stack-{self._turns}-{rank}')
            world = World(rank, self.size, self._server.port)
            process = context.Process(target=_serve, args=(theirs, world, str(log)), daemon=True)
            process.start()
            theirs.close()
            self._workers[rank] = Worker(process, ours, log)

    def _outcomes(self, timeout: float, may_die: Collection) -> Dict[int, tuple]:
        outcomes: Dict[int, tuple] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < self.size:
            open_ = {worker.connection: rank for rank, worker in enumerate(self._workers) if rank not in outcomes}
            ready = wait(list(open_), max(deadline - time.monotonic(), 0.0))
            if not ready:
                outcomes.update({rank: (LATE, self._stack(rank)) for rank in open_.values()})
            for connection in ready:
                rank = open_[connection]
                outcomes[rank] = _answer(connection)
                if outcomes[rank][0] != DONE and rank not in may_die:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return outcomes

    def _stack(self, rank: int) -> str:
        worker = self._workers[rank]
        os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return worker.log.read_text() if worker.log.exists() else ''

    def _end(self, rank: int) -> None:
        worker, self._workers[rank] = self._workers[rank], None
        if worker is not None:
            worker.connection.close()
            worker.process.kill()
            worker.process.join()

    def _end_all(self) -> None:
        for rank in range(self.size):
            self._end(rank)
        # Whoever comes next must not meet what these have left in the store.
        self._server = None


def standing_group(world: World, size: Optional[int] = None):
    """A group of the first ``size`` workers of a pool, or of all, which stays for all calls."""
    return _standing_group(world, world.size if size is None else size)


@functools.cache
def _standing_group(world: World, size: int):
    return join_transfer_group(world.store('standing'), world.rank, size, timeout=PATIENCE, name=f'group of {size}')


def _answer(connection: Connection) -> tuple:
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        return DIED, ''


def _account(bad: Dict[int, tuple]) -> str:
    """What went wrong first, and what the others say."""
    failed = sorted((outcome[1], rank) for rank, outcome in bad.items() if outcome[0] == FAILED)
    if failed:
        (_, text), rank = failed[0]
        return f'process {rank} failed first:\n{text}'
    return '\n'.join(f'process {rank} {kind}:\n{text}' for rank, (kind, text) in sorted(bad.items()))


def _serve(connection: Connection, world: World, log: str) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, open(log, 'w'), all_threads=True)
    # Until the test is over, or its process is gone.
    with suppress(EOFError, ConnectionError):
        while True:
            connection.send(_called(connection.recv_bytes(), world))
    # Not through interpreter shutdown: its threads may abort a process whose work is done.
    os._exit(0)


def _called(job: bytes, world: World) -> tuple:
    try:
        turn, function, args = pickle.loads(job)
        return DONE, pickle.dumps(function(world, turn, *args))
    except BaseException:
        return FAILED, (time.monotonic(), traceback.format_exc())
