# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks of a small ZeRO-3 training run, for the test of the adapter. Needs DeepSpeed."""

import os
import sys
import traceback

# Sizes that three ranks do not divide: of one element only rank 0 holds anything but padding.
SHAPES = {"matrix": (5, 7), "vector": (4, ), "single": (1, ), "cube": (2, 3, 5), "frozen": (7, 2)}
STEPS = 2


def run(rank, world_size, port, results):
    """Put ("done", one entry for each step) or ("failed", traceback), and end this process without a shutdown."""
    os.environ.update(DS_ACCELERATOR="cpu",
                      RANK=str(rank),
                      LOCAL_RANK=str(rank),
                      WORLD_SIZE=str(world_size),
                      MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    code = 1
    try:
        results.send(("done", _train(rank, world_size, port)))
        code = 0
    except BaseException:
        results.send(("failed", traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(rank, world_size, port):
    import deepspeed
    import torch
    import torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = _model()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    engine, *_ = deepspeed.initialize(model=model,
                                      optimizer=optimizer,
                                      config={
                                          "train_micro_batch_size_per_gpu": 1,
                                          "zero_allow_untested_optimizer": True,
                                          "zero_optimization": {
                                              "stage": 3
                                          },
                                      })
    buffers = _described(engine)
    entries = []
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(1)))
        engine.step()
        entries.append(_compare(engine, buffers))
    dist.barrier()
    return entries


def _model():
    import torch

    class Model(torch.nn.Module):

        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            for name, shape in SHAPES.items():
                setattr(self, name, torch.nn.Parameter(torch.randn(shape), requires_grad=name != "frozen"))

        def forward(self, scale):
            return scale.sum() * sum((parameter * parameter).sum() for parameter in self.parameters())

    return Model()


def _described(engine):
    """{name: (map, buffers)}, taken once before the first step."""
    from deepspeed.checkpoint.affine_adapters import zero3_parameter
    return {
        name: zero3_parameter(parameter, locations=[30, 10, 20])
        for name, parameter in engine.module.named_parameters()
    }


def _compare(engine, described):
    """What the adapter says beside the gathered parameter, as plain lists."""
    import deepspeed
    entry = {}
    for name, parameter in engine.module.named_parameters():
        layout, buffers = described[name]
        (location, tensor), = buffers.items()
        with deepspeed.zero.GatheredParameters([parameter]):
            full = parameter.detach().reshape(-1).tolist()
        entry[name] = {
            "map": layout.to_dict(),
            "location": location,
            "buffer": tensor.tolist(),
            "is_a_view": tensor.numel() == 0 or tensor.data_ptr() == parameter.ds_tensor.data_ptr(),
            "full": full
        }
    return entry
