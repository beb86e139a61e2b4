# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Processes that write a checkpoint in another layout, and are killed or watched while they do it."""

import contextlib
import io
import os
import signal
import sys
import threading
import time

from deepspeed.checkpoint.affine_adapters.checkpoints import open_checkpoint
from deepspeed.checkpoint.affine_adapters.disk_layouts import split_layout, whole_layout
from ds_affine.reshard import stored_dtypes, write

# What the interpreter tells of a process that makes, fills, renames or removes files.
_TOLD = {"open", "mmap.__new__", "fcntl.flock", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir",
         "os.scandir", "shutil.rmtree"}  # yapf: disable
# Two of the test's tensors.
FILE_BYTES = 1_000_000


def reshard(source, destination, progress=None):
    """Write whole parameters, in several files where they are larger than one."""
    parameters, layout = _whole(source)
    write(parameters, layout, destination, progress=progress)


def reshard_over_ranks(source, destination, degree):
    """Write what each rank holds; what has a digit in its name is cut."""
    parameters, shapes, dtypes = _opened(source)
    write(parameters, split_layout(shapes, dtypes, degree, [(r"\d", 0)]), destination)


def _whole(source):
    parameters, shapes, dtypes = _opened(source)
    return parameters, whole_layout(shapes, dtypes, FILE_BYTES)


def _opened(source):
    parameters = open_checkpoint(source).parameters
    shapes = {name: held.layout.logical_shape for name, held in parameters.items()}
    return parameters, shapes, stored_dtypes(parameters, None)


def killed_before_each_step(world, source, folder):
    """Write again and again, into ``folder / number / 'out'``, and be killed before the step of that number, until one
    run ends. A step is what Python does with a file or folder, or a parameter that has been copied."""
    number = 0
    while _fork(lambda: _end_at(number, source, folder / str(number) / "out")) == -signal.SIGKILL:
        number += 1
    return number


def _end_at(number, source, destination):
    steps = 0

    def take(*_):
        nonlocal steps
        if steps == number:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1

    def hear(event, arguments):
        if event in _TOLD:
            take()

    parameters, layout = _whole(source)
    sys.addaudithook(hear)
    write(parameters, layout, destination, progress=take)


def killed_after(world, source, folder, fractions):
    """Write into ``folder / 'whole' / 'out'``; and then again into ``folder / number / 'out'``, killed after such a
    part of the time that the first run took. Returns that, in seconds."""
    parameters, layout = _whole(source)
    begun = time.monotonic()
    assert _fork(lambda: write(parameters, layout, folder / "whole" / "out")) == 0
    duration = time.monotonic() - begun
    for number, fraction in enumerate(fractions):
        _fork(lambda: write(parameters, layout, folder / str(number) / "out"), fraction * duration)
    return duration


def _fork(work, seconds=None):
    """Exit code of a copy of this process that works, killed after so many seconds."""
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def reshard_in_turns(connection, source, destination):
    """Say when one parameter is copied, and go on when told to."""
    told = False

    def wait(*_):
        nonlocal told
        if not told:
            connection.send("begun")
            told = connection.recv()

    reshard(source, destination, progress=wait)


def growth(world, arguments, kind):
    """Exit code of a command, and by how many bytes this process' memory grew at most while it ran.

    ``kind`` is RssAnon for what is private, and VmRSS for that and what it has in memory of mapped files.
    """
    from ds_affine.cli import main
    with contextlib.redirect_stdout(io.StringIO()):
        # What it imports is no part of what it holds of a model.
        main(["inspect", arguments[1]])
        before = _bytes(kind)
        peak, done = before, threading.Event()

        def look():
            nonlocal peak
            while not done.is_set():
                peak = max(peak, _bytes(kind))
                time.sleep(0.0005)

        watcher = threading.Thread(target=look)
        watcher.start()
        code = main(arguments)
        done.set()
        watcher.join()
    return code, peak - before


def _bytes(kind):
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024
