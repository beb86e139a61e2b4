# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Write a checkpoint in another layout, tensor by tensor, through mapped files."""

import fcntl
import json
import os
import re
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from deepspeed.checkpoint.affine_adapters.safetensors_files import INDEX, MAPS, new_file
from deepspeed.checkpoint.affine_adapters.stored import CheckpointError
from deepspeed.checkpoint.affine_transfer import ParameterTransfer, TransferEndpoints, plan_transfers
from deepspeed.checkpoint.affine_transfer_executor import apply_plan
from ds_affine.mapped import Residents

# Seconds between beginnings to write to disk.
SYNC_EVERY = 0.2
# What is written has no other names.
_OUTPUT = re.compile(r'model(-tp)?(-\d{5}-of-\d{5})?\.safetensors|' + '|'.join(map(re.escape, (INDEX, MAPS))))


def stored_dtypes(parameters, dtype):
    """``{name: dtype}``: ``dtype`` for what is floating-point, where one is given; else what it has."""
    return {
        name: dtype if dtype is not None and held.dtype.is_floating_point else held.dtype
        for name, held in parameters.items()
    }


def check_free(destination):
    """Raise FileExistsError if there is something of this name."""
    if os.path.lexists(destination):
        raise FileExistsError(f'{destination}: is there already. Remove it, or choose another name.')


def write(parameters, layout, destination, *, workers=1, memory=None, progress=None):
    """Write parameters into a new folder.

    The folder has its name when all is on disk, and not before. What an earlier run left unfinished is removed.

    Args:
        parameters: name -> ``HeldParameter``, for all names of ``layout.places``.
        layout: ``DiskLayout``.
        destination: path of the folder; it must not be there.
        workers: parameters that are copied at one time.
        memory: bytes of the files that may be in this process' memory besides the parameters being copied; None for as
            many as the kernel leaves there, which it takes back when it needs them.
        progress: called with bytes done and bytes in all.

    Raises:
        CheckpointError: another run is writing the folder.
        OSError: it is there, no space, or a kernel that cannot bound ``memory``.
    """
    destination = Path(destination)
    plan = _plan(parameters, layout)
    with _unfinished(destination) as folder, ExitStack() as files:
        tensors = {}
        for file in layout.files:
            made = files.enter_context(new_file(folder / file.name, file.tensors))
            tensors.update({(file.location, name): tensor for name, tensor in made.items()})
        done, residents = 0, Residents(memory)
        with _synced_meanwhile([folder / file.name for file in layout.files]), ThreadPoolExecutor(workers) as pool:

            def copy(name):
                shards = _copy(name, parameters, plan, layout.places[name], tensors)
                residents.add([*parameters[name].buffers.values(), *shards])
                return sum(shard.nbytes for shard in shards)

            for numbytes in pool.map(copy, layout.places):
                done += numbytes
                if progress is not None:
                    progress(min(done, layout.numbytes), layout.numbytes)
        for name, content in layout.indices.items():
            _write_json(folder / name, content)


def _plan(parameters, layout):
    transfers = {
        name: ParameterTransfer(place.layout, parameters[name].layout, parameters[name].dtype)
        for name, place in layout.places.items()
    }
    sources = {location for held in parameters.values() for location in held.layout.shard_shapes}
    targets = {file.location for file in layout.files}
    here = TransferEndpoints(dict.fromkeys(sources, 0), dict.fromkeys(targets, 0))
    return plan_transfers(transfers, endpoints=here)


def _copy(name, parameters, plan, place, tensors):
    shards = {}
    for location, shape in place.layout.shard_shapes.items():
        tensor = tensors[location, place.tensor]
        shards[location] = tensor if tuple(tensor.shape) == shape else tensor.narrow(0, place.start, shape[0])
    dtype = next(iter(shards.values())).dtype
    apply_plan(plan[name], parameters[name].buffers, shards, target_dtype=dtype, name=name)
    return list(shards.values())


@contextmanager
def _synced_meanwhile(paths):
    """Bring files to disk while they are filled, so that little is left to do when they are full."""
    over = threading.Event()

    def sync():
        while not over.wait(SYNC_EVERY):
            for path in paths:
                # Whoever syncs the whole file at the end is told of the same errors.
                with suppress(OSError), open(path, 'rb') as file:
                    os.fsync(file.fileno())

    thread = threading.Thread(target=sync)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _write_json(path, content):
    with open(path, 'x') as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _unfinished(destination):
    """A new folder beside ``destination`` that gets its name at the end, and is removed where that is not reached."""
    check_free(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    folder = destination.parent / f'.{destination.name}.unfinished'
    folder.mkdir(exist_ok=True)
    with _opened(folder) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f'{destination}: another process is writing it.') from None
        if not folder.exists() or not os.path.samestat(os.fstat(handle), os.stat(folder)):
            raise CheckpointError(f'{destination}: another process has just ended writing it. Look, or run again.')
        check_free(destination)
        for path in _left_by_a_run(folder):
            path.unlink()
        try:
            yield folder
            os.fsync(handle)
            os.rename(folder, destination)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    with _opened(destination.parent.resolve()) as handle:
        os.fsync(handle)


def _left_by_a_run(folder):
    """Files of a run that was killed; anything else is somebody's."""
    left = list(folder.iterdir())
    for path in left:
        if not _OUTPUT.fullmatch(path.name) or not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(
                f'{folder}: has {path.name!r}, which no run of ds_affine has written. Move the folder '
                'away: what is written goes through a folder of this name.')
    return left


@contextmanager
def _opened(folder):
    # Not through a link, behind which somebody else's files may be.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield handle
    finally:
        os.close(handle)
