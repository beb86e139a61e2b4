# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks of small ZeRO training runs that save checkpoints, and tell the whole values that they saved. Needs DeepSpeed.

The ranks are those of an ``affine_rank_host.RankHost``.
"""

from dataclasses import dataclass, field

import torch

from affine_zero_processes import EMPTY, build_model, config, optimizer_of, step

WORLD_SIZE = 4
STEP = "global_step2"
STEPS = 2
# What users save beside the model.
CLIENT_STATE = {"epoch": 3, "losses": [0.5, 0.25], "sampler": torch.arange(3)}
SMALL_SCALE = {"fp16": {"enabled": True, "initial_scale_power": 4}}


class Adapted(torch.nn.Module):
    """A frozen layer with a low-rank adapter beside it, as LoRA has."""

    def __init__(self, rows, columns, rank=2):
        super().__init__()
        self.base = torch.nn.Linear(columns, rows)
        self.base.requires_grad_(False)
        self.lora_A = torch.nn.Linear(columns, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, rows, bias=False)

    def forward(self, hidden):
        return self.base(hidden) + self.lora_B(self.lora_A(hidden))


class AdaptedModel(torch.nn.Module):

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList([Adapted(7, 5), Adapted(5, 7)])
        self.norm = torch.nn.LayerNorm(5)
        self.norm.requires_grad_(False)

    def forward(self, scale):
        hidden = scale * torch.linspace(-1, 1, 5, dtype=scale.dtype)
        for layer in self.layers:
            hidden = layer(hidden)
        return (self.norm(hidden)**2).sum() + (hidden**3).sum()


def small():
    return build_model()


def small_with_empty():
    return build_model(EMPTY)


@dataclass(frozen=True)
class Run:
    """One run: configuration of DeepSpeed, number of parameter groups, what makes the model, how it is saved."""
    settings: dict
    groups: int = 1
    model: type = small
    options: dict = field(default_factory=dict)


# The flat buffers of bfloat16 with gradients in float32 are those of another optimizer of DeepSpeed's.
RUNS = {
    "zero3_fp32": Run(config(3, stage3_param_persistence_threshold=10), groups=2),
    "zero3_bf16": Run(config(3, "bf16", sub_group_size=5, stage3_param_persistence_threshold=0), groups=2),
    "zero3_fp16": Run(config(3) | SMALL_SCALE),
    "zero1_bf16": Run(config(1, "bf16"), groups=2, model=small_with_empty),
    "zero1_bf16_fp32_gradients": Run(config(1, "bf16") | {"data_types": {
        "grad_accum_dtype": "fp32"
    }}),
    "zero2_fp32": Run(config(2), groups=3, model=small_with_empty),
    "zero2_fp16": Run(config(2) | SMALL_SCALE, groups=2),
    "zero2_bf16_aligned": Run(config(2, "bf16", parameter_alignment=True)),
    "zero2_round_robin": Run(config(2, round_robin_gradients=True)),
    "without_zero": Run(config(0), model=small_with_empty),
    "lora_zero3": Run(config(3, "bf16", stage3_param_persistence_threshold=0), model=AdaptedModel),
    "lora_zero2": Run(config(2, "bf16"), model=AdaptedModel),
    "lora_zero2_adapters": Run(config(2), model=AdaptedModel, options={"exclude_frozen_parameters": True}),
    "lora_zero3_adapters": Run(config(3), model=AdaptedModel, options={"exclude_frozen_parameters": True}),
}


def save(rank, world_size, folder):
    """Save every run in a folder of its name; returns ``{run: {name: whole tensor}}`` with tied names and buffers."""
    import deepspeed
    values = {}
    for name, run in RUNS.items():
        model = run.model()
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model, run.groups), config=run.settings)
        for _ in range(STEPS):
            step(engine)
        engine.save_checkpoint(f"{folder}/{name}", tag=STEP, client_state=dict(CLIENT_STATE), **run.options)
        values[name] = _whole(engine)
    return values


def _whole(engine):
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param
    whole = {name: buffer.detach().clone() for name, buffer in engine.module.named_buffers()}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and engine.zero_optimization_stage() and parameter.numel() + _hidden(parameter):
            whole[name] = safe_get_full_fp32_param(parameter).detach().clone()
        else:
            with deepspeed.zero.GatheredParameters([parameter]):
                whole[name] = parameter.detach().clone()
    return whole


def _hidden(parameter):
    """Elements of a parameter that ZeRO-3 has taken away."""
    return getattr(parameter, "ds_numel", 0)
