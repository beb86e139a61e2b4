# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command `ds_affine demo`: launch, print, and say by the exit code whether every shard is exact."""

import importlib.metadata
import sys

from ds_affine.demo.launcher import DemoFailed, launch
from ds_affine.demo.report import rows, show


def run(options):
    """Return 0 when every shard of every parameter is exact, else 1."""
    version = _deepspeed_version()
    print(_introduction(version), flush=True)
    try:
        lines = launch(use_deepspeed=version is not None, timeout=options.timeout)
    except DemoFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    table = rows(lines)
    show(table)
    exact = sum(row.exact for row in table)
    print(f"{exact} of {len(table)} parameters exact: compared with gather-then-cut, bit for bit, on every rollout.")
    return 0 if table and exact == len(table) else 1


def _deepspeed_version():
    """None without DeepSpeed; its folder is importable then too, so only its metadata tells."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None


def _introduction(version):
    if version is None:
        trainers = "plain torch, ZeRO-3 partitions cut by deepspeed-affine (DeepSpeed is not installed)"
    else:
        trainers = f"DeepSpeed {version} engines, ZeRO stage 3, partitions are their own ds_tensors"
    return ("2 trainers, one optimizer step, then every parameter to 2 rollouts in tensor-parallel shards.\n"
            f"Trainers: {trainers}.\n"
            "Rollouts: q, k and v fused; frozen parameters (*) partly from the shards of a former placement.")
