# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What an environment sees of the affine packages. Run by the packaging tests inside fresh environments.

`python affine_installed_probe.py NAME` prints the answer of one probe as JSON on the last line.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile

PACKAGES = ("deepspeed.checkpoint.affine", "deepspeed.checkpoint.affine_adapters",
            "deepspeed.checkpoint.affine_geometry", "deepspeed.checkpoint.affine_transfer",
            "deepspeed.checkpoint.affine_transfer_executor", "ds_affine")


def origins():
    """The file behind each import; None for a namespace package, a message for an import that fails."""
    found = {}
    for name in ("deepspeed", "deepspeed.checkpoint", *PACKAGES):
        try:
            found[name] = getattr(importlib.import_module(name), "__file__", None)
        except ImportError as error:
            found[name] = f"ImportError: {error}"
    return found


def versions():
    found = {}
    for name in ("deepspeed", "deepspeed-affine", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def is_deepspeed_available():
    """What transformers tells, and what accelerate would: a package is there when its metadata is."""
    from transformers.integrations.deepspeed import is_deepspeed_available as asked
    return {"spec": importlib.util.find_spec("deepspeed") is not None, "available": bool(asked())}


def help_imports():
    """Which heavy packages are loaded by asking the command for its help."""
    from ds_affine.cli import main
    try:
        main(["--help"])
    except SystemExit as end:
        code = end.code
    return {"code": code, "loaded": sorted({"torch", "numpy", "deepspeed"} & set(sys.modules))}


def _rebuilt_in_worker(results):
    results.put(_split_and_rebuild())


def _split_and_rebuild():
    import torch
    from deepspeed.checkpoint import affine
    layout = affine.contiguous_split_map((5, 3), [3, 2], 0)
    full = torch.arange(15.).view(5, 3)
    shards = {rank: layout.extract(full, rank) for rank in (0, 1)}
    exact = bool(torch.equal(layout.rebuild(shards), full))
    return {"process": os.getpid(), "file": affine.__file__, "exact": exact}


def worker():
    """The same from a spawned process, which imports everything anew."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_rebuilt_in_worker, args=(results, ))
    process.start()
    answer = results.get(timeout=120)
    process.join(60)
    return {**answer, "parent": os.getpid(), "exit": process.exitcode}


def call_sites():
    """DeepSpeed derives a map, converts with it and restores from it; which files of `affine` ran is recorded."""
    import deepspeed  # noqa: F401
    from deepspeed.checkpoint import affine, ds_to_universal, universal_checkpoint
    ran = set()
    sys.setprofile(lambda frame, event, argument: ran.add(frame.f_code.co_filename))
    try:
        derived = _derive()
        merged = _convert(derived)
        restored = _restore(derived)
    finally:
        sys.setprofile(None)
    return {
        "affine": affine.__file__,
        "same_class": [module.ParamAffineMap is affine.ParamAffineMap
                       for module in (ds_to_universal, universal_checkpoint)],
        "derived_by": sys.modules[type(derived).__module__].__file__,
        "ran": sorted(path for path in ran if "/deepspeed/checkpoint/affine" in path),
        "merged": merged.tolist(),
        "restored": restored.tolist(),
    }  # yapf: disable


def _derive():
    from deepspeed.module_inject.layers import _derive_affine_map
    return _derive_affine_map(tp_world_size=2,
                              logical_shape=(5, 3),
                              partition_dim=0,
                              partition_sizes=(3, 2),
                              sub_param_shard_widths=None,
                              replicated=False,
                              unsupported_reason=None)


def _convert(layout):
    """Merge the fragments of two tensor-parallel ranks as the converter does, and read the result back."""
    import torch
    from deepspeed.checkpoint import constants, ds_to_universal
    full = torch.arange(15.).view(5, 3)
    info = {
        constants.AFFINE_MAP: {
            constants.AFFINE_MAP_VERSION: 1,
            constants.AFFINE_MAP_PARAMS: {
                "^weight$": layout.to_dict()
            }
        }
    }
    with tempfile.TemporaryDirectory() as folder:
        slices, result = os.path.join(folder, "slices"), os.path.join(folder, "result")
        os.makedirs(os.path.join(result, "weight"))
        for rank, shard in enumerate((full[:3], full[3:])):
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                ds_to_universal.dump_param_fragment(slices, rank, 0, state, shard.reshape(-1), "weight", 0,
                                                    shard.numel())
        ds_to_universal.merge_tp_slices(info, result, slices, 2, ("weight", [(3, 3), (2, 3)]))
        return torch.load(os.path.join(result, "weight", "fp32.pt"), weights_only=False)["param"]


def _restore(layout):
    """The second tensor-parallel rank takes its shard of the whole parameter as a resuming job does."""
    import torch
    from deepspeed.checkpoint import constants, universal_checkpoint
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    setattr(parameter, constants.DS_AUTOTP_UC_META, {"conversion": {"affine_map": layout.to_dict()}})
    return universal_checkpoint._resolve_autotp_partition(parameter, {}, torch.arange(15.).view(5, 3), 1, 2)


PROBES = {
    probe.__name__: probe
    for probe in (origins, versions, is_deepspeed_available, help_imports, worker, call_sites)
}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
