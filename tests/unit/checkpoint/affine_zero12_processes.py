# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks of small ZeRO-1 and ZeRO-2 training runs, for the tests of the adapters. Needs DeepSpeed."""

from affine_zero_processes import (EMPTY, STEPS, ReplicatedModel, build_model, config, forget_mpu, optimizer_of, start,
                                   step, view)

WORLD_SIZE = 4
ACCUMULATED_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
# name: configuration, number of parameter groups, which optimizer of DeepSpeed's that comes to.
CASES = {
    "stage 1, fp32": (config(1), 2, "DeepSpeedZeroOptimizer"),
    "stage 2, fp32": (config(2), 2, "DeepSpeedZeroOptimizer"),
    # Scaled losses would overflow in the first steps, which are then left out.
    "stage 2, fp16": (config(2) | {
        "fp16": {
            "enabled": True,
            "loss_scale": 1
        }
    }, 3, "DeepSpeedZeroOptimizer"),
    "stage 1, bf16": (config(1, "bf16"), 2, "DeepSpeedZeroOptimizer"),
    "stage 1, bf16, fp32 gradients": (config(1, "bf16") | ACCUMULATED_IN_FP32, 1, "BF16_Optimizer"),
    "stage 2, aligned": (config(2, "bf16", parameter_alignment=True), 1, "DeepSpeedZeroOptimizer"),
    "stage 2, round robin": (config(2, round_robin_gradients=True), 1, "DeepSpeedZeroOptimizer"),
    "stage 2, offloaded": (config(2, "bf16", offload_optimizer={"device": "cpu"}), 2, "DeepSpeedZeroOptimizer"),
    "stage 2, two copies": (config(2, "bf16"), 1, "DeepSpeedZeroOptimizer"),
}


def run(world):
    """{case: a report after each number of steps from 0 up}, and the classes of the optimizers."""
    deepspeed = start(world)
    import torch.distributed as dist
    reports, optimizers = {}, {}
    for case, (settings, groups, _) in CASES.items():
        copies = {"mpu": ReplicatedModel(world.rank)} if "two copies" in case else {}
        model = build_model(EMPTY)
        engine, *_ = deepspeed.initialize(model=model,
                                          optimizer=optimizer_of(model, groups),
                                          config=settings,
                                          **copies)
        reports[case] = _train(engine, replica_groups=ReplicatedModel.GROUPS if copies else None)
        optimizers[case] = type(engine.optimizer).__name__
        forget_mpu()
    dist.barrier()
    return reports, optimizers


def _train(engine, replica_groups):
    """What the adapters handed out before the first step, beside what the engine has after each."""
    from deepspeed.checkpoint.affine_adapters.replicated import replicated_maps
    from deepspeed.checkpoint.affine_adapters.zero12 import zero12_master_maps
    held = {"weights": replicated_maps(engine), "master": zero12_master_maps(engine, replica_groups=replica_groups)}
    reports = []
    for number in range(STEPS + 1):
        if number:
            step(engine)
        reports.append(_report(engine.module, held))
    return reports


def _report(module, held):
    from deepspeed.utils import safe_get_full_fp32_param
    views = {kind: {} for kind in held}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        views["weights"][name] = view(held["weights"][name], parameter)
        if name in held["master"]:
            views["master"][name] = view(held["master"][name], safe_get_full_fp32_param(parameter))
    for name, buffer in module.named_buffers(remove_duplicate=False):
        views["weights"][name] = view(held["weights"][name], buffer)
    return views
