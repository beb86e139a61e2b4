# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command `ds_affine doctor`: what is installed, which affine module is in use, what is missing.

It must start where this library's packages are hidden, so it imports none of them.
"""

import importlib.metadata
import importlib.util
import pathlib
import platform

from ds_affine.cli import HIDDEN, hiding_deepspeed
from ds_affine.tables import show

PACKAGES = {
    "deepspeed-affine": "this library",
    "torch": "required",
    "numpy": "required",
    "deepspeed": "optional; beside it, it uses this library's maps",
    "rich": "optional: tables and progress bars",
    "safetensors": "needed to read safetensors files",
    "matplotlib": "needed by explain --figure",
    "shtab": "needed by completion",
}


def run(options):
    """Return 0, or 1 where something keeps this library from being used."""
    rows = [("Python", platform.python_version(), "")]
    rows += [(name, _version(name), what) for name, what in PACKAGES.items()]
    show("versions", ("package", "version", ""), rows)
    print()
    problems = [*_missing(), *_hidden()]
    if not problems:
        _say_modules()
        _say_backends()
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _missing():
    for name in ("torch", "numpy"):
        if importlib.util.find_spec(name) is None:
            yield f"{name} is missing; pip install {name}"


def _hidden():
    found = hiding_deepspeed()
    if found is not None:
        yield HIDDEN.format(found=found).removeprefix("ds_affine: ")


def _say_modules():
    """Where `deepspeed.checkpoint.affine` comes from: a package wins over a module of its name beside it."""
    for folder in importlib.util.find_spec("deepspeed").submodule_search_locations:
        package = pathlib.Path(folder) / "checkpoint" / "affine"
        if package.is_dir():
            print(f"deepspeed.checkpoint.affine: {package}, this library's")
            own = package.with_suffix(".py")
            if own.is_file():
                print(f"  DeepSpeed's own, not in use: {own}")
    print("  Beside a DeepSpeed newer than those tested its own module is used, with a warning; "
          "DEEPSPEED_AFFINE=ours overrules that.")


def _say_backends():
    import torch
    import torch.distributed as dist
    there = [
        name for name in ("gloo", "nccl", "mpi") if dist.is_available() and getattr(dist, f"is_{name}_available")()
    ]
    gpus = torch.cuda.device_count()
    print(f"torch.distributed: {', '.join(there) or 'not available'}; GPUs: {gpus}")
    if gpus and "nccl" not in there:
        print("  This torch has no nccl, so tensors on GPUs cannot be moved between processes.")
