# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command `ds_affine reshard`: choose a layout, say what will be written, write it."""

import contextlib
import importlib.util
import os
import resource
import sys
from pathlib import Path

import torch

from deepspeed.checkpoint.affine_adapters.checkpoints import open_checkpoint
from deepspeed.checkpoint.affine_adapters.disk_layouts import (Place, rank_layout, server_disk_layout, split_layout,
                                                               whole_layout)
from deepspeed.checkpoint.affine_adapters.safetensors_files import read_json
from deepspeed.checkpoint.affine_adapters.server import DecoderModel, server_layout
from ds_affine.choice import chosen, is_chosen
from ds_affine.reshard import check_free, stored_dtypes, write
from ds_affine.tables import plain, size

FILE_BYTES = 5 * 10**9
CONFIG = "config.json"
OTHER_OPEN_FILES = 8


def run(options):
    """Return 0 when the folder is written."""
    _check(options)
    check_free(options.destination)
    checkpoint = open_checkpoint(options.source)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    layout, unknown = _layout(options, checkpoint.parameters, stored_dtypes(checkpoint.parameters, dtype))
    if not options.quiet:
        _say(options, checkpoint, layout, {**checkpoint.left_out, **unknown})
    if not options.dry_run:
        _allow_open_files(len(layout.files), options.to)
        with _progress(options.quiet) as progress:
            write(checkpoint.parameters,
                  layout,
                  options.destination,
                  workers=options.workers,
                  memory=options.memory,
                  progress=progress)
    return 0


def _check(options):
    """Raise ValueError for options that mean nothing beside one another."""
    beside = "--to hf" if options.to is None else f"--to tp-{options.to}"
    useless = {beside: ("fused", "config", "split") if options.to is None else ("file_size", )}
    if options.to is not None and options.split:
        useless["--split"] = ("fused", "config")
    for beside, names in useless.items():
        for name in names:
            if getattr(options, name):
                raise ValueError(f"--{name.replace('_', '-')} means nothing beside {beside}")
    if options.fused and (options.include or options.exclude):
        raise ValueError("--fused stores a whole model; leave out --include and --exclude")


def _layout(options, held, dtypes):
    """The layout, and names that it leaves out although they were chosen -> why."""
    parameters = chosen(held, options.include, options.exclude)
    if not parameters:
        filters = " that --include and --exclude leave" if options.include or options.exclude else ""
        raise ValueError(f"{options.source}: has no parameters{filters}")
    shapes = {name: one.layout.logical_shape for name, one in parameters.items()}
    if options.to is None:
        return whole_layout(shapes, dtypes, options.file_size or FILE_BYTES), {}
    if options.split:
        return split_layout(shapes, dtypes, options.to, options.split), {}
    server = _server(options, held)
    unknown = {name: f"a model of {_config(options)} has no such parameter" for name in parameters
               if name not in server.parts}  # yapf: disable
    if options.fused:
        return server_disk_layout(server, options.to, dtypes), unknown
    # A head that is tied here may be one of its own there.
    places = {name: Place(part.target_map, name) for name, part in server.parts.items()
              if is_chosen(name, options.include, options.exclude)}  # yapf: disable
    if not places:
        raise ValueError(f"{options.source}: has no parameters of a model of {_config(options)} that --include and "
                         "--exclude leave")
    return rank_layout(places, dtypes, options.to), unknown


def _server(options, held):
    path = _config(options)
    if not path.is_file():
        raise ValueError(
            f"--to tp-{options.to} needs the model's {CONFIG}, by --config, or --split: how heads are cut "
            "does not follow from shapes")
    try:
        server = server_layout(DecoderModel.from_config(read_json(path)), options.to)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error
    for name, part in server.parts.items():
        if name not in held:
            raise ValueError(f"{options.source}: has no {name!r}, which a model of {path} has")
        found, needed = held[name].layout.logical_shape, tuple(part.target_map.logical_shape)
        if found != needed:
            raise ValueError(
                f"{options.source}: {name!r} has shape {found}, but {path} describes a model where it has "
                f"{needed}")
    return server


def _config(options):
    return Path(options.config or Path(options.source, CONFIG))


def _say(options, checkpoint, layout, left_out):
    print(f"{options.source} ({checkpoint.kind}): {len(layout.places)} parameters to {len(layout.files)} files, "
          f"{size(layout.numbytes)}, in {options.destination}")
    for name, why in left_out.items():
        print(f"left out: {plain(name)}: {why}")
    if options.dry_run:
        for file in layout.files:
            print(f"  {file.name}: {len(file.tensors)} tensors, {size(file.numbytes)}")


def _allow_open_files(count, degree):
    """All files are written at one time, and each is open twice: for its header and for its memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * count + len(os.listdir("/proc/self/fd")) + OTHER_OPEN_FILES
    if resource.RLIM_INFINITY != soft < needed:
        if resource.RLIM_INFINITY != hard < needed:
            other = "" if degree else ", or a larger --file-size"
            raise ValueError(f"writing {count} files at one time takes {needed} open files, of which {hard} are "
                             f"allowed; allow more by ulimit -Hn {needed}{other}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextlib.contextmanager
def _progress(quiet):
    """What to call with bytes done and bytes in all; None where nobody looks."""
    if quiet or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield None
        return
    from deepspeed.checkpoint.affine_transfer_executor.progress import progress_bar
    with progress_bar("reshard") as advance:
        yield advance
