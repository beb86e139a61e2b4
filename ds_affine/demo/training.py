# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One optimizer step on ZeRO-3 partitions: by a DeepSpeed engine, or in plain torch with partitions cut by us.

Both return a Trained value, with the partitions that this process holds after the step.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepspeed.checkpoint.affine.partitions import zero3_partition_map
from deepspeed.checkpoint.affine_adapters.zero3 import zero3_parameter

from ds_affine.demo.layouts import TRAINERS, trainer_locations
from ds_affine.demo.model import build_model, trainable, training_tokens

LEARNING_RATE = 0.01
BATCH_PER_RANK = 4


@dataclass(frozen=True)
class Trained:
    """maps: by parameter name, over all trainers. buffers: {location: tensor} by parameter name, of this process.
    full: whole parameters by name, gathered for the reference."""
    maps: dict
    buffers: dict
    full: dict


def train_with_deepspeed(rank, locations):
    """The partitions are the engine's own ds_tensors."""
    import deepspeed
    # Its shared-memory collectives would be compiled first; gloo does here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = build_model()
    optimizer = torch.optim.AdamW(trainable(model), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config())
    engine.backward(engine(training_tokens(rank)))
    engine.step()
    maps, buffers, full = {}, {}, {}
    for name, parameter in engine.module.named_parameters():
        maps[name], buffers[name] = zero3_parameter(parameter, locations=trainer_locations(locations, name))
        with deepspeed.zero.GatheredParameters([parameter]):
            full[name] = parameter.detach().clone()
    return Trained(maps, buffers, full)


def train_with_torch(rank, locations):
    """Data-parallel on whole parameters, then cut into the partitions that ZeRO-3 would hold."""
    model = build_model()
    optimizer = torch.optim.AdamW(trainable(model), lr=LEARNING_RATE)
    model(training_tokens(rank)).backward()
    for parameter in trainable(model):
        dist.all_reduce(parameter.grad)
        parameter.grad /= TRAINERS
    optimizer.step()
    maps, buffers, full = {}, {}, {}
    for name, parameter in model.named_parameters():
        ids = trainer_locations(locations, name)
        full[name] = parameter.detach()
        maps[name] = zero3_partition_map(tuple(parameter.shape), TRAINERS, locations=ids)
        buffers[name] = {ids[rank]: maps[name].extract(full[name], ids[rank])}
    return Trained(maps, buffers, full)


def _config():
    return {
        "train_micro_batch_size_per_gpu": BATCH_PER_RANK,
        "zero_optimization": {
            "stage": 3
        },
        "zero_allow_untested_optimizer": True,
    }
