# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks of small ZeRO-3 training runs, for the tests of the adapters. Needs DeepSpeed."""

from affine_zero_processes import (STEPS, ReplicatedModel, build_model, config, forget_mpu, optimizer_of, start, step,
                                   view)

WORLD_SIZE = 4
HPZ = 2
# Parameters are released after the forward pass rather than kept for the backward pass.
HPZ_CONFIG = config(3,
                    zero_hpz_partition_size=HPZ,
                    stage3_param_persistence_threshold=0,
                    stage3_max_live_parameters=0,
                    stage3_max_reuse_distance=0)
CPU = {"device": "cpu"}
# Of the model's parameters two have at most ten elements.
TRAINING = {
    "fp32": config(3, stage3_param_persistence_threshold=10),
    "bf16, sub-groups": config(3, "bf16", sub_group_size=5, stage3_param_persistence_threshold=0),
    "bf16, offloaded": config(3, "bf16", offload_param=CPU, offload_optimizer=CPU),
}
PARAMETER_LOCATIONS = [30, 10, 20, 40]
ROW_HOLDERS = {100: 1, 101: 3}


def run(world):
    """{case: a report after each number of steps from 0 up}, and under further names what single tests ask for."""
    deepspeed = start(world)
    import torch.distributed as dist
    reports = {}
    for case, settings in TRAINING.items():
        engine = _engine(deepspeed, settings)
        reports[case] = _train(deepspeed, engine)
        reports[f"{case}, moved"] = _move_to_rows(engine, world.rank)
    reports["without an optimizer"] = _inference(deepspeed)
    reports["two copies"] = _two_copies(deepspeed, world.rank)
    # Last, because from the first engine with hpZ on every engine has it.
    reports["hpZ"] = _secondary(deepspeed)
    dist.barrier()
    return reports


def _engine(deepspeed, settings, **options):
    model = build_model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=settings, **options)
    return engine


def _train(deepspeed, engine, **options):
    """What the adapters handed out before the first step, beside what the engine has after each."""
    from deepspeed.checkpoint.affine_adapters.zero3 import zero3_maps, zero3_parameter
    from deepspeed.checkpoint.affine_adapters.zero3_master import zero3_master_maps
    held = {"weights": zero3_maps(engine, **options), "master": zero3_master_maps(engine, **options)}
    single = None if options else zero3_parameter(engine.module.cube, locations=PARAMETER_LOCATIONS)
    reports = []
    for number in range(STEPS + 1):
        if number:
            step(engine)
        reports.append(_report(deepspeed, engine.module, held))
        if single is not None:
            layout, buffers = single
            reports[-1]["cube alone"] = layout, {location: tensor.tolist() for location, tensor in buffers.items()}
    return reports


def _report(deepspeed, module, held):
    from deepspeed.utils import safe_get_full_fp32_param
    views = {kind: {} for kind in held}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter]):
            for kind in set(held) - {"master"}:
                if name in held[kind]:
                    views[kind][name] = view(held[kind][name], parameter)
        if name in held.get("master", ()):
            views["master"][name] = view(held["master"][name], safe_get_full_fp32_param(parameter))
    for name, buffer in module.named_buffers(remove_duplicate=False):
        views["weights"][name] = view(held["weights"][name], buffer)
    return views


def _inference(deepspeed):
    """A model made in pieces and never trained; its engine has no optimizer."""
    from deepspeed.checkpoint.affine_adapters.zero3 import zero3_maps
    from deepspeed.checkpoint.affine_adapters.zero3_master import zero3_master_maps
    settings = config(3)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = build_model()
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    try:
        zero3_master_maps(engine)
        said = None
    except ValueError as error:
        said = str(error)
    return {"refusal": said, "report": _report(deepspeed, engine.module, {"weights": zero3_maps(engine.module)})}


def _two_copies(deepspeed, rank):
    from deepspeed.checkpoint.affine_adapters.zero3 import zero3_maps
    engine = _engine(deepspeed, config(3, "bf16"), mpu=ReplicatedModel(rank))
    alone = {name: sorted(held.layout.shard_shapes) for name, held in zero3_maps(engine).items()}
    reports = _train(deepspeed, engine, replica_groups=ReplicatedModel.GROUPS)
    forget_mpu()
    return {"alone": alone, "reports": reports}


def _secondary(deepspeed):
    """Which secondary partitions there are in the phases of a step, and what they hold between them."""
    import torch

    from deepspeed.checkpoint.affine.union import union_affine_maps
    from deepspeed.checkpoint.affine_adapters.zero3 import zero3_maps
    from deepspeed.checkpoint.affine_adapters.zero3_secondary import zero3_secondary_maps
    engine = _engine(deepspeed, HPZ_CONFIG)
    step(engine)
    present = {"after a step": sorted(zero3_secondary_maps(engine))}
    loss = engine(torch.ones(1))
    present["after a forward pass"] = sorted(zero3_secondary_maps(engine))
    held = {"weights": zero3_maps(engine), "secondary": zero3_secondary_maps(engine)}
    united = {
        name: union_affine_maps([held["weights"][name].layout, secondary.layout])
        for name, secondary in held["secondary"].items()
    }
    report = _report(deepspeed, engine.module, held)
    engine.backward(loss)
    engine.step()
    return {"present": present, "report": report, "united": united}


def _move_to_rows(engine, rank):
    """Move the model through the library: cut by rows, to two of the ranks, in bf16 from master weights."""
    import torch

    from deepspeed.checkpoint.affine import contiguous_split_map, relabel
    from deepspeed.checkpoint.affine_adapters.zero3 import zero3_maps
    from deepspeed.checkpoint.affine_adapters.zero3_master import zero3_master_maps
    from deepspeed.checkpoint.affine_transfer import ParameterTransfer, TransferEndpoints, plan_transfers
    from deepspeed.checkpoint.affine_transfer_executor import TransferRequest, execute_transfers
    module_names = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    held = {**zero3_maps(engine), **zero3_master_maps(engine)}
    held = {name: one for name, one in held.items() if name in module_names}
    endpoints = TransferEndpoints(source={rank: rank for rank in range(WORLD_SIZE)}, target=ROW_HOLDERS)
    transfers, received = {}, {}
    for name, one in held.items():
        rows = one.layout.logical_shape[0]
        split = contiguous_split_map(one.layout.logical_shape, [rows // 2, rows - rows // 2], 0)
        target = relabel(split, dict(enumerate(ROW_HOLDERS)))
        transfers[name] = ParameterTransfer(target_map=target,
                                            source_map=one.layout,
                                            source_dtype=one.dtype,
                                            target_dtype=torch.bfloat16,
                                            source=one.tied_to)
        received[name] = {
            location: torch.zeros(target.shard_shapes[location], dtype=torch.bfloat16)
            for location, owner in ROW_HOLDERS.items() if owner == rank
        }
    plan = plan_transfers(transfers, endpoints=endpoints)
    requests = [
        TransferRequest(plan[name],
                        one.buffers,
                        received[name],
                        name=name,
                        dtype=one.dtype,
                        target_dtype=torch.bfloat16) for name, one in held.items()
    ]
    execute_transfers(requests, endpoints, torch.bfloat16)
    return {
        name: {
            location: tensor.reshape(-1).tolist()
            for location, tensor in shards.items()
        }
        for name, shards in received.items()
    }
