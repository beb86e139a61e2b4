# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What ranks of small ZeRO engines on CPU have in common: their start, their model, and how they report.

A *view* is what an adapter said of a tensor beside the whole tensor that DeepSpeed itself has, in values that pickle.
"""

import os

# Sizes that four ranks do not divide; of one element rank 0 alone holds anything but padding. A parameter without axes
# is no case: DeepSpeed 0.19.8 fails when it broadcasts one. Nor is an empty one under ZeRO-3, where it fails when it
# gathers one in a forward pass.
TRAINED = {"matrix": (5, 7), "vector": (4, ), "single": (1, ), "cube": (2, 3, 5), "inner.weight": (3, 4)}
FROZEN = {"frozen": (7, 2)}
EMPTY = {"empty": (0, 3)}
TIED = {"inner.tied": "matrix"}
BUFFERS = {"table": (3, 2), "inner.counter": ()}
STEPS = 3


def start(world):
    """Join the default group as a rank that DeepSpeed can run on, and return the deepspeed module."""
    os.environ.update(DS_ACCELERATOR="cpu",
                      RANK=str(world.rank),
                      LOCAL_RANK=str(world.rank),
                      WORLD_SIZE=str(world.size),
                      MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(world.port))
    world.init_default_group()
    import deepspeed
    # Its shared-memory collectives would be compiled first; gloo does here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def build_model(extra=()):
    """A model with the parameters and buffers above; ``extra``: further shapes by name."""
    import torch

    class Inner(torch.nn.Module):

        def __init__(self, tied):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(TRAINED["inner.weight"]))
            self.tied = tied
            self.register_buffer("counter", torch.tensor(7), persistent=False)

        def forward(self, scale):
            return scale.sum() * ((self.weight * self.weight).sum() + (self.tied * self.tied).sum())

    class Model(torch.nn.Module):

        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            for name, shape in {**TRAINED, **FROZEN, **dict(extra)}.items():
                if "." not in name:
                    setattr(self, name, torch.nn.Parameter(torch.randn(shape), requires_grad=name != "frozen"))
            self.inner = Inner(self.matrix)
            self.register_buffer("table", torch.randn(BUFFERS["table"]))

        def forward(self, scale):
            own = sum((parameter * parameter).sum() for parameter in self.parameters(recurse=False))
            return scale.sum() * own + self.inner(scale)

    return Model()


def optimizer_of(model, groups=2):
    """AdamW over several parameter groups, each in another order than that of the model."""
    import torch
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW([{"params": trained[number::groups][::-1]} for number in range(groups)], lr=0.1)


class ReplicatedModel:
    """What DeepSpeed calls an mpu: data-parallel groups of which each holds a whole copy of the model."""

    GROUPS = [[0, 2], [1, 3]]
    _ACROSS = [[0, 1], [2, 3]]

    def __init__(self, rank):
        import torch.distributed as dist
        self._data = [dist.new_group(ranks) for ranks in self.GROUPS][rank % 2]
        self._model = [dist.new_group(ranks) for ranks in self._ACROSS][rank // 2]
        self._rank = dist.get_rank

    def get_model_parallel_group(self):
        return self._model

    def get_model_parallel_rank(self):
        return self._rank(self._model)

    def get_model_parallel_world_size(self):
        return 2

    def get_data_parallel_group(self):
        return self._data

    def get_data_parallel_rank(self):
        return self._rank(self._data)

    def get_data_parallel_world_size(self):
        return 2


def forget_mpu():
    """Engines made from now on use the whole job again: DeepSpeed keeps the last mpu."""
    from deepspeed.utils import groups
    groups.mpu = None


def config(stage, dtype="fp32", **zero):
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 10000,
            **zero
        }
    }
    if dtype != "fp32":
        settings[dtype] = {"enabled": True}
    return settings


def step(engine):
    import torch
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(1, dtype=dtype)))
    engine.step()


def view(held, full):
    """What an adapter said of a tensor, and the whole tensor."""
    return {
        "layout": held.layout,
        "buffers": {
            location: tensor.reshape(-1).tolist()
            for location, tensor in held.buffers.items()
        },
        "dtype": str(held.dtype),
        "dtypes": [str(tensor.dtype) for tensor in held.buffers.values()],
        "tied_to": held.tied_to,
        "full": full.detach().reshape(-1).tolist()
    }
