# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Start the processes of the demo, wait for all of them, and end all of them when one fails."""

import multiprocessing
import pathlib
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait

from ds_affine.demo.worker import Assignment, run

LOG_TAIL_BYTES = 4000


class DemoFailed(Exception):
    """A process of the demo failed, died or did not finish; the message holds its traceback and its last output."""


@dataclass
class _Running:
    assignment: Assignment
    process: multiprocessing.Process
    connection: object
    lines: list = None


def launch(use_deepspeed, timeout, entry=run):
    """Run the demo and return {label of the process: its lines}.

    entry: what each process runs; it sends ("done", lines) or ("failed", traceback) over the connection it is given.

    Raises DemoFailed as soon as one process has failed or timeout (seconds) has passed; no process is left behind.
    """
    import torch.distributed as dist
    # Held here, at a port that the system chooses: no process can find its port taken.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    with tempfile.TemporaryDirectory(prefix="ds_affine_demo_") as folder:
        running = []
        try:
            for role in ("trainer", "rollout"):
                for rank in range(2):
                    log = str(pathlib.Path(folder) / f"{role}{rank}.log")
                    assignment = Assignment(role, rank, use_deepspeed, store.port, folder, log, timeout)
                    running.append(_start(entry, assignment))
            _collect(running, time.monotonic() + timeout)
        finally:
            _end(running)
    return {worker.assignment.label: worker.lines for worker in running}


def _start(entry, assignment):
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=entry, args=(assignment, sending), daemon=True)
    process.start()
    sending.close()
    return _Running(assignment, process, receiving)


def _collect(running, deadline):
    """Take each process' message; one that dies closes its connection, which wakes the wait as well."""
    open_ones = {worker.connection: worker for worker in running}
    while open_ones:
        ready = wait(list(open_ones), timeout=max(0, deadline - time.monotonic()))
        if not ready:
            names = ", ".join(worker.assignment.label for worker in open_ones.values())
            raise DemoFailed(f"Not finished in time: {names}.\n{_tails(open_ones.values())}")
        for connection in ready:
            _take(open_ones.pop(connection))


def _take(worker):
    try:
        outcome, content = worker.connection.recv()
    except EOFError:
        worker.process.join()
        raise DemoFailed(f"{worker.assignment.label} died with exit code {worker.process.exitcode}.\n"
                         f"{_tails([worker])}") from None
    if outcome == "failed":
        raise DemoFailed(f"{worker.assignment.label} failed.\n{_tails([worker])}{content}")
    worker.lines = content


def _tails(workers):
    """The last that each of these processes printed."""
    text = ""
    for worker in workers:
        log = pathlib.Path(worker.assignment.log)
        if log.exists() and log.stat().st_size:
            tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
            text += f"--- last output of {worker.assignment.label}\n{tail}\n"
    return text


def _end(running):
    """Those that have sent their lines end by themselves, at once; the others are killed."""
    for worker in running:
        if worker.lines is None:
            worker.process.kill()
    for worker in running:
        worker.process.join(10)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()
