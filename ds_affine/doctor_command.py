# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command `ds_affine doctor`: what is installed, which affine module is in use, what is missing.

It must start where this library's packages are hidden, so it imports none of them.
"""

import importlib.metadata
import importlib.util
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
    if importlib.util.find_spec("deepspeed") is None:
        yield "this library's packages are missing; pip install deepspeed-affine"


def _hidden():
    found = hiding_deepspeed()
    if found is not None:
        yield HIDDEN.format(found=found).removeprefix("ds_affine: ")


def _say_modules():
    """Whose classes `deepspeed.checkpoint.affine` hands out: beside a newer DeepSpeed they are DeepSpeed's."""
    from deepspeed.checkpoint import affine
    ours = affine.ParamAffineMap.__module__.startswith("deepspeed.checkpoint.affine.")
    print(f"deepspeed.checkpoint.affine: {affine.__file__}, {'this library' if ours else 'DeepSpeed'}'s")
    if not ours:
        print(
            "  This DeepSpeed is newer than those tested, so its own module is used; DEEPSPEED_AFFINE=ours overrules "
            "that.")


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
