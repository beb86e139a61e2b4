# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What works in an environment that the wheel is installed into. Run there by compatibility.py.

`python compatibility_probe.py CHECK...` runs each check in a process of its own and prints on its last line, as JSON,
what came of each: `state` is "ok", "absent" (the environment has nothing that this check is about) or "failed", and
`said` is what there is to know beside that, in a few words.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import pathlib
import sys
import sysconfig
import tempfile
import time
import traceback
from datetime import timedelta

PACKAGES = ("affine", "affine_geometry", "affine_transfer", "affine_transfer_executor", "affine_adapters")
RANKS = 2
# Seconds; the machine may be busy with other things.
RANKS_TIMEOUT = 300
CHECK_TIMEOUT = 400
# Forked, a process has what is imported already: half the time of a check would be spent on importing torch.
PROCESSES = multiprocessing.get_context("fork")
MOVABLE = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
           "float8_e5m2fnuz", "float8_e8m0fnu", "complex64", "complex128", "int64", "int32", "int16", "int8", "uint64",
           "uint32", "uint16", "uint8", "bool")
SHAPE = (5, 6)
COLUMNS = [4, 2]
HIDDEN, INNER = 8, 12


class Absent(Exception):
    """The environment lacks what the check is about, and nothing is wrong with that."""


def expect(truth, what):
    """Not `assert`, which an optimising Python leaves out."""
    if not truth:
        raise ValueError(what)


# ------------------------------------------------------------------ what is installed


def versions():
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "numpy", "deepspeed", "deepspeed-affine"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def affine_module():
    """Whose `deepspeed.checkpoint.affine` an import finds."""
    try:
        module = importlib.import_module("deepspeed.checkpoint.affine")
    except ModuleNotFoundError:
        return "none"
    place = pathlib.Path(module.__file__)
    expect(place.is_relative_to(sysconfig.get_path("purelib")), f"{place} is not in the environment")
    return "ours" if place.name == "__init__.py" else "DeepSpeed's"


def imports():
    """All packages of the library, with a real DeepSpeed imported first where there is one."""
    if versions()["deepspeed"] is not None:
        importlib.import_module("deepspeed").initialize
    for package in PACKAGES:
        place = pathlib.Path(importlib.import_module(f"deepspeed.checkpoint.{package}").__file__)
        expect(place.name == "__init__.py" and place.is_relative_to(sysconfig.get_path("purelib")),
               f"deepspeed.checkpoint.{package} is {place}")
    importlib.import_module("ds_affine.cli")
    return affine_module()


# ------------------------------------------------------------------ without DeepSpeed


def one_process():
    """Constructors, a union, plans in both directions and their execution, against slices of the whole tensor."""
    import torch
    from deepspeed.checkpoint import affine
    from deepspeed.checkpoint.affine_transfer import plan_transfer
    from deepspeed.checkpoint.affine_transfer_executor import apply_plan
    full = torch.arange(30.).view(SHAPE)
    layouts = {
        "whole": affine.replicated_map(SHAPE, 2),
        "rows": affine.contiguous_split_map(SHAPE, [3, 0, 2], 0),
        "columns": affine.contiguous_split_map(SHAPE, COLUMNS, 1),
        "fused": affine.sub_param_map(SHAPE, sub_dim_sizes=(4, 2), shard_widths=((3, 1), (1, 1)), partition_dim=1),
        "blocks": affine.block_gather_map(SHAPE, {
            0: [2, 0],
            1: [1]
        }, 2, 1),
        "flat": affine.zero3_partition_map(SHAPE, 4),
    }
    layouts["both"] = affine.union_affine_maps([layouts["flat"], affine.relabel(layouts["columns"], {0: 10, 1: 11})])
    for source in layouts.values():
        held = {at: source.extract(full, at) for at in source.shard_shapes}
        for name, target in layouts.items():
            shards = {at: torch.full(shape, -1.) for at, shape in target.shard_shapes.items()}
            apply_plan(plan_transfer(target_map=target, source_map=source), held, shards)
            expect(all(torch.equal(shard, target.extract(full, at)) for at, shard in shards.items()), name)
    columns = {at: layouts["columns"].extract(full, at) for at in (0, 1)}
    for shard, own in zip(columns.values(), full.split(COLUMNS, 1)):
        expect(torch.equal(shard, own), "a shard is not the slice that torch cuts")
    expect(torch.equal(layouts["columns"].rebuild(columns), full), "rebuild")


def two_processes():
    """A batch, and a compiled program run three times, between two processes over gloo, verified by checksums."""
    run_ranks(_batch_and_program)


def _batch_and_program(rank):
    import torch
    from deepspeed.checkpoint.affine_transfer import ParameterTransfer, plan_transfers
    from deepspeed.checkpoint.affine_transfer_executor import (TransferRequest, compile_transfer, execute_transfers)
    source, target, owners = _crossing()
    names = ["up", "down"]
    plan = plan_transfers({name: ParameterTransfer(target, source, torch.float32) for name in names}, endpoints=owners)
    full = torch.arange(30.).view(SHAPE)
    held = {name: _extracted(source, full + number, rank) for number, name in enumerate(names)}
    shards = {name: _empty(target, 1 - rank, torch.float32) for name in names}
    requests = [TransferRequest(plan[name], held[name], shards[name], name=name) for name in names]
    execute_transfers(requests, owners, torch.float32)
    program = compile_transfer(plan, held, shards, owners, torch.float32, verify=True)
    for step in range(3):
        for number, name in enumerate(names):
            expect(torch.equal(shards[name][1 - rank], target.extract(full + number + step, 1 - rank)), name)
            held[name][rank] += 1
        program.run()


def joint_group():
    """Two jobs with a default group each, and a group of both for transfers."""
    run_ranks(_join, default_group=False)


def _join(rank):
    import torch
    import torch.distributed as dist
    from deepspeed.checkpoint.affine_transfer import plan_transfer
    from deepspeed.checkpoint.affine_transfer_executor import execute_transfer, join_transfer_group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    source, target, owners = _crossing()
    full = torch.arange(30.).view(SHAPE)
    shards = _empty(target, 1 - rank, torch.float32)
    store = dist.FileStore(os.environ["PROBE_STORE"], RANKS)
    with join_transfer_group(store, rank, RANKS, timeout=60) as group:
        execute_transfer(plan_transfer(target_map=target, source_map=source),
                         _extracted(source, full, rank),
                         shards,
                         owners,
                         torch.float32,
                         group=group)
    expect(torch.equal(shards[1 - rank], target.extract(full, 1 - rank)), "the shard differs")


def dtypes():
    """Every dtype that the library moves and this torch has, bit for bit, in one process and between two."""
    import torch
    present = [name for name in MOVABLE if hasattr(torch, name)]
    for name in present:
        _move_bits(name)
    run_ranks(_move_all_bits, present)
    lacking = [name for name in MOVABLE if name not in present]
    return f"all {len(present)}" + (f" (this torch has no {', '.join(lacking)})" if lacking else "")


def _move_bits(name):
    import torch
    from deepspeed.checkpoint.affine_transfer import plan_transfer
    from deepspeed.checkpoint.affine_transfer_executor import apply_plan
    source, target, _ = _crossing()
    full = _bits(getattr(torch, name))
    shards = {at: torch.empty(shape, dtype=full.dtype) for at, shape in target.shard_shapes.items()}
    partitions = full.view(-1).split(15)
    apply_plan(plan_transfer(target_map=target, source_map=source), dict(enumerate(partitions)), shards)
    for at, own in enumerate(full.split(COLUMNS, 1)):
        expect(_same_bits(shards[at], own), name)


def _move_all_bits(rank, names):
    import torch
    from deepspeed.checkpoint.affine_transfer import plan_transfer
    from deepspeed.checkpoint.affine_transfer_executor import TransferRequest, execute_transfers
    source, target, owners = _crossing()
    plan = plan_transfer(target_map=target, source_map=source)
    shards, requests = {}, []
    for name in names:
        dtype = getattr(torch, name)
        shards[name] = _empty(target, 1 - rank, dtype)
        own = _bits(dtype).view(-1).split(15)[rank]
        requests.append(TransferRequest(plan, {rank: own}, shards[name], name=name, dtype=dtype))
    execute_transfers(requests, owners, torch.uint8)
    for name in names:
        own = _bits(getattr(torch, name)).split(COLUMNS, 1)[1 - rank]
        expect(_same_bits(shards[name][1 - rank], own), name)


def _crossing():
    """Flat partitions to columns, each shard on the other process than the partition of its number."""
    from deepspeed.checkpoint.affine import contiguous_split_map, zero3_partition_map
    from deepspeed.checkpoint.affine_transfer import TransferEndpoints
    owners = TransferEndpoints(source={0: 0, 1: 1}, target={0: 1, 1: 0})
    return zero3_partition_map(SHAPE, 2), contiguous_split_map(SHAPE, COLUMNS, 1), owners


def _extracted(layout, full, at):
    return {at: layout.extract(full, at).clone()}


def _empty(layout, at, dtype):
    import torch
    return {at: torch.empty(layout.shard_shapes[at], dtype=dtype)}


def _bits(dtype):
    import torch
    generator = torch.Generator().manual_seed(7)
    if dtype == torch.bool:
        return torch.randint(0, 2, SHAPE, generator=generator).bool()
    size = SHAPE[0] * SHAPE[1] * torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (size, ), dtype=torch.uint8, generator=generator).view(dtype).view(SHAPE)


def _same_bits(one, other):
    import torch
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and torch.equal(*raw)


def dtensor():
    """A DTensor cut by rows goes to columns, on the map that the adapter makes of it."""
    if not any(_has_module(name) for name in ("torch.distributed.tensor", "torch.distributed._tensor")):
        raise Absent("this torch has no DTensor")
    run_ranks(_move_dtensor)


def _has_module(name):
    return importlib.util.find_spec(name) is not None


def _move_dtensor(rank):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from deepspeed.checkpoint.affine import contiguous_split_map
    from deepspeed.checkpoint.affine_adapters.dtensor import dtensor_map
    from deepspeed.checkpoint.affine_transfer import TransferEndpoints, plan_transfer
    from deepspeed.checkpoint.affine_transfer_executor import execute_transfer
    tensors = importlib.import_module(
        "torch.distributed.tensor" if hasattr(torch.distributed, "tensor")
        and _has_module("torch.distributed.tensor.placement_types") else "torch.distributed._tensor")
    mesh = init_device_mesh("cpu", (RANKS, ))
    full = torch.arange(30.).view(SHAPE)
    cut = tensors.distribute_tensor(full.clone(), mesh, [tensors.Shard(0)])
    layout, held = dtensor_map(cut)
    target = contiguous_split_map(SHAPE, COLUMNS, 1)
    shards = _empty(target, rank, torch.float32)
    everyone = dict(enumerate(range(RANKS)))
    execute_transfer(plan_transfer(target_map=target, source_map=layout), held, shards,
                     TransferEndpoints(source=everyone, target=everyone), torch.float32)
    expect(torch.equal(shards[rank], full.split(COLUMNS, 1)[rank]), "the shard differs from the slice")


# ------------------------------------------------------------------ beside DeepSpeed


def zero3():
    """Weights of a ZeRO-3 engine after a step go to columns, equal to what DeepSpeed itself gathers."""
    _require_deepspeed()
    _deepspeed()
    run_ranks(_move_zero3)


def _require_deepspeed():
    if versions()["deepspeed"] is None:
        raise Absent("without DeepSpeed")


def _move_zero3(rank):
    import torch
    deepspeed = _deepspeed()
    from deepspeed.checkpoint.affine import contiguous_split_map
    from deepspeed.checkpoint.affine_adapters import zero3_parameter
    from deepspeed.checkpoint.affine_transfer import TransferEndpoints, plan_transfer
    from deepspeed.checkpoint.affine_transfer_executor import TransferRequest, execute_transfers
    engine = _engine(deepspeed, {"zero_optimization": {"stage": 3}})
    _step(engine)
    everyone = dict(enumerate(range(RANKS)))
    requests, shards, wanted = [], {}, {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            full = parameter.detach().clone()
        half = full.shape[-1] // 2
        sizes = [half, full.shape[-1] - half]
        target = contiguous_split_map(tuple(full.shape), sizes, full.dim() - 1)
        layout, held = zero3_parameter(parameter)
        wanted[name], shards[name] = full.split(sizes, -1)[rank], _empty(target, rank, full.dtype)
        requests.append(
            TransferRequest(plan_transfer(target_map=target, source_map=layout), held, shards[name], name=name))
    execute_transfers(requests, TransferEndpoints(source=everyone, target=everyone), torch.float32)
    for name, own in wanted.items():
        expect(torch.equal(shards[name][rank], own), f"{name} differs from what DeepSpeed gathered")


def autotp():
    """AutoTP marks its layers with maps of ours, which cut the whole weights into the shards that it trains."""
    _require_deepspeed()
    from deepspeed.checkpoint import constants
    if not hasattr(constants, "AFFINE_MAP"):
        raise Absent("this release has no maps")
    run_ranks(_autotp_maps)


def _autotp_maps(rank):
    import torch
    deepspeed = _deepspeed()
    from deepspeed.checkpoint import affine, constants
    whole = dict(_model().named_parameters())
    with Calls("to_dict") as calls:
        engine = _engine(deepspeed, _TENSOR_PARALLEL)
    expect(affine_module() == "ours" and calls.number, f"{calls.number} maps of the class in {affine.__file__}")
    marked = 0
    for name, parameter in engine.module.named_parameters():
        meta = getattr(parameter, constants.DS_AUTOTP_UC_META, None)
        if meta is None:
            continue
        layout = affine.ParamAffineMap.from_dict(meta["conversion"]["affine_map"])
        expect(torch.equal(layout.extract(whole[name], rank), parameter), f"{name} is not what its map says")
        marked += 1
    expect(marked == 2, f"{marked} parameters with maps")


def universal():
    """A checkpoint of two tensor-parallel ranks, converted by DeepSpeed, holds the weights that were trained."""
    _require_deepspeed()
    _deepspeed()
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_save, folder)
        rebuilt = _convert(folder)
        _compare(folder)
    return "from maps" if rebuilt else "without maps"


def _save(rank, folder):
    import torch
    deepspeed = _deepspeed()
    from deepspeed.utils import safe_get_full_fp32_param
    engine = _engine(deepspeed, _TENSOR_PARALLEL)
    _step(engine)
    engine.save_checkpoint(folder, tag="saved")
    own = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in engine.module.named_parameters()}
    torch.save(own, os.path.join(folder, f"rank-{rank}.pt"))


def _convert(folder):
    """Returns how often a parameter was rebuilt from its map."""
    from deepspeed.checkpoint import ds_to_universal
    with Calls("rebuild") as calls:
        ds_to_universal.main(
            argparse.Namespace(input_folder=f"{folder}/saved",
                               output_folder=f"{folder}/converted",
                               num_extract_workers=1,
                               num_merge_workers=1,
                               keep_temp_folder=False,
                               strict=True,
                               inject_missing_state=False))
    return calls.number


def _compare(folder):
    import torch
    ranks = [torch.load(os.path.join(folder, f"rank-{rank}.pt"), weights_only=True) for rank in range(RANKS)]
    for name, axis in {"up.weight": 0, "down.weight": 1}.items():
        path = os.path.join(folder, "converted", "zero", name, "fp32.pt")
        merged = torch.load(path, weights_only=False)["param"]
        expect(torch.equal(merged, torch.cat([own[name] for own in ranks], axis)), f"{name} was merged wrongly")


class Calls:
    """Within it, counts the calls of a method of the map class that DeepSpeed's modules import."""

    def __init__(self, method):
        self.method = method
        self.number = 0

    def __enter__(self):
        from deepspeed.checkpoint.affine import ParamAffineMap
        self.held = ParamAffineMap
        self.own = getattr(ParamAffineMap, self.method)

        def counted(*args, **kwargs):
            self.number += 1
            return self.own(*args, **kwargs)

        setattr(ParamAffineMap, self.method, counted)
        return self

    def __exit__(self, *_):
        setattr(self.held, self.method, self.own)


_TENSOR_PARALLEL = {
    "zero_optimization": {
        "stage": 1
    },
    "tensor_parallel": {
        "autotp_size": RANKS,
        "partition_config": {
            "use_default_specs":
            False,
            "layer_specs": [{
                "patterns": [r"up\.weight$"],
                "partition_type": "column"
            }, {
                "patterns": [r"down\.weight$"],
                "partition_type": "row"
            }]
        }
    }
}


def _deepspeed():
    import deepspeed
    # Its shared-memory collectives would be compiled first; gloo does here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _model():
    import torch

    class Model(torch.nn.Module):

        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.norm = torch.nn.LayerNorm(HIDDEN)
            self.up = torch.nn.Linear(HIDDEN, INNER, bias=False)
            self.down = torch.nn.Linear(INNER, HIDDEN, bias=False)

        def forward(self, batch):
            return self.down(torch.relu(self.up(self.norm(batch)))).square().sum()

    return Model()


def _engine(deepspeed, settings):
    import torch
    model = _model()
    engine, *_ = deepspeed.initialize(model=model,
                                      optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
                                      config={
                                          "train_micro_batch_size_per_gpu": 1,
                                          "zero_allow_untested_optimizer": True,
                                          "zero_force_ds_cpu_optimizer": False,
                                          **settings
                                      })
    return engine


def _step(engine):
    import torch
    engine.backward(engine(torch.arange(float(HIDDEN)).view(1, HIDDEN)))
    engine.step()


# ------------------------------------------------------------------ processes


def run_ranks(function, *args, default_group=True):
    """Run `function(rank, *args)` in RANKS processes; raises what one of them said, or that it was late."""
    with tempfile.TemporaryDirectory() as folder:
        started = [
            PROCESSES.Process(target=_run_rank, args=(rank, folder, default_group, function, args))
            for rank in range(RANKS)
        ]
        for process in started:
            process.start()
        _wait(started)
        said = [_word_of(process, pathlib.Path(folder, f"error-{rank}")) for rank, process in enumerate(started)]
        for process in started:
            process.kill()
            process.join()
    # Of a process that waited in vain for the other one, the other one knows more.
    said = sorted((word for word in said if word), key=lambda word: "did not end" in word)
    expect(not said, said and said[0])


def _wait(processes):
    """Until all have ended, time is up, or one failed and the others had a moment to say so too."""
    deadline = time.monotonic() + RANKS_TIMEOUT
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.05)


def _word_of(process, path):
    if path.exists():
        return path.read_text()
    if process.exitcode is None:
        return f"a process did not end in {RANKS_TIMEOUT} seconds"
    return f"a process ended with {process.exitcode}" if process.exitcode else None


def _run_rank(rank, folder, default_group, function, args):
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
    os.environ.update(PROBE_STORE=os.path.join(folder, "joint"))
    with _ending(pathlib.Path(folder, f"error-{rank}")):
        if default_group:
            dist.init_process_group("gloo",
                                    init_method=f"file://{folder}/store",
                                    rank=rank,
                                    world_size=RANKS,
                                    timeout=timedelta(seconds=RANKS_TIMEOUT))
        function(rank, *args)
        if default_group:
            dist.barrier()


@contextlib.contextmanager
def _ending(path):
    """End this process after what is within, and leave what it raised in the file."""
    code = 0
    try:
        yield
    except BaseException as error:
        traceback.print_exc()
        path.write_text(f"{type(error).__name__}: {error}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through interpreter shutdown: threads of an engine may abort a process whose work is done.
    os._exit(code)


def _run_check(name, path):
    try:
        answer = {"state": "ok", "said": CHECKS[name]()}
    except Absent as absent:
        answer = {"state": "absent", "said": str(absent)}
    except Exception as error:
        traceback.print_exc()
        answer = {"state": "failed", "said": f"{type(error).__name__}: {error}"}
    path.write_text(json.dumps(answer))


def answer_of(name):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "answer")
        process = PROCESSES.Process(target=_run_check, args=(name, path))
        process.start()
        process.join(CHECK_TIMEOUT)
        process.kill()
        process.join()
        if path.exists():
            return json.loads(path.read_text())
    return {
        "state": "failed",
        "said": f"the process ended with {process.exitcode} after {CHECK_TIMEOUT} seconds at most"
    }


CHECKS = {
    check.__name__: check
    for check in (versions, affine_module, imports, one_process, two_processes, joint_group, dtypes, dtensor, zero3,
                  autotp, universal)
}

if __name__ == "__main__":
    with contextlib.suppress(Exception):
        import torch.distributed  # noqa: F401 (for the forked processes; what fails here fails there again)
    answers = {}
    for check in sys.argv[1:]:
        began = time.monotonic()
        answers[check] = answer_of(check)
        print(f"{check}: {answers[check]} in {time.monotonic() - began:.1f} s", flush=True)
    print(json.dumps(answers))
