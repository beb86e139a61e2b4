# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Processes of one job on this machine, and the memory that each of them takes."""

import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

LIMIT_SECONDS = 1200
PROC = pathlib.Path('/proc/self')


def run_job(size, backend, device, work, *arguments):
    """The results of ``work(rank, device, *arguments)`` by rank, in new processes that share a default group.

    A job of one process has no group. On ``cuda`` every rank has a device of its own. The benchmark ends if a process
    fails, dies or takes longer than LIMIT_SECONDS.
    """
    context = multiprocessing.get_context('spawn')
    store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    # Set for the children: one process is not to use the cores of the others.
    os.environ['OMP_NUM_THREADS'] = '1'
    connections, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        job = (theirs, store.port, rank, size, backend, device, work, arguments)
        processes.append(context.Process(target=_rank, args=job, daemon=True))
        processes[-1].start()
        theirs.close()
        connections.append(ours)
    try:
        return _answers(connections)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answers(connections):
    answers = {}
    while len(answers) < len(connections):
        waiting = [connection for connection in connections if connection not in answers]
        ready = multiprocessing.connection.wait(waiting, LIMIT_SECONDS)
        if not ready:
            raise SystemExit(f'a process has not answered within {LIMIT_SECONDS} seconds')
        for connection in ready:
            rank = connections.index(connection)
            try:
                failed, answer = connection.recv()
            except EOFError:
                failed, answer = True, 'it died'
            if failed:
                raise SystemExit(f'process {rank} failed: {answer}')
            answers[connection] = answer
    return [answers[connection] for connection in connections]


def _rank(connection, port, rank, size, backend, kind, work, arguments):
    try:
        torch.set_num_threads(1)
        device = torch.device('cpu') if kind == 'cpu' else torch.device(kind, rank)
        if kind != 'cpu':
            getattr(torch, kind).set_device(device)
        if size > 1:
            store = dist.TCPStore('127.0.0.1', port, is_master=False)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size,
                                    timeout=timedelta(seconds=LIMIT_SECONDS))  # yapf: disable
        connection.send((False, work(rank, device, *arguments)))
    except Exception:
        connection.send((True, traceback.format_exc()))
    # Everybody's connections stay open until the last has answered: then all are killed.
    connection.poll(LIMIT_SECONDS)


class Peak:
    """Most memory above what this process has when this is made: resident memory, or memory of an accelerator."""

    def __init__(self, device):
        self._device = device
        if device.type == 'cpu':
            self._start = _resident('VmRSS')
            if self._start is not None:
                (PROC / 'clear_refs').write_text('5')
        else:
            accelerator = getattr(torch, device.type)
            accelerator.reset_peak_memory_stats(device)
            self._start = accelerator.memory_allocated(device)

    def above(self):
        """Bytes up to now, or None where there is no /proc."""
        if self._start is None:
            return None
        if self._device.type == 'cpu':
            return max(_resident('VmHWM') - self._start, 0)
        return getattr(torch, self._device.type).max_memory_allocated(self._device) - self._start


def written():
    """Bytes that this process has given to the kernel so far, for sockets too; None where there is no /proc."""
    return _entry('io', 'wchar')


def _resident(kind):
    found = _entry('status', kind)
    return None if found is None else found * 1024


def _entry(file, name):
    try:
        text = (PROC / file).read_text()
    except OSError:
        return None
    return int(re.search(rf'{name}:\s+(\d+)', text)[1])
