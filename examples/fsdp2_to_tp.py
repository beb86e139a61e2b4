# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Weights of a torch FSDP2 trainer go to the tensor-parallel shards of a server, without DeepSpeed.

It starts its own four processes; CPU is enough::

    pip install deepspeed-affine
    python examples/fsdp2_to_tp.py

Processes 0 and 1 train a small model with ``fully_shard`` for a step. Processes 2 and 3 hold the same model cut by
``parallelize_module``. Trainer and server are jobs with a world each, so neither can see the other's DTensors: each
takes its own shards from ``dtensor_map`` and describes the other's by ``placement_map``. Then the shards are moved,
and the server's ``full_tensor()`` is compared with the trainer's, bit for bit.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from deepspeed.checkpoint.affine_adapters.dtensor import dtensor_map
from deepspeed.checkpoint.affine_adapters.placements import placement_map
from deepspeed.checkpoint.affine_transfer import ParameterTransfer, TransferEndpoints, plan_transfers
from deepspeed.checkpoint.affine_transfer_executor import TransferRequest, execute_transfers, join_transfer_group

TRAINERS, SERVERS = 2, 2
PROCESSES = TRAINERS + SERVERS
DTYPE = torch.float32
# Neither job's two processes divide it: 51 rows and 50.
VOCABULARY = 101
PARALLEL = {'embed': RowwiseParallel(input_layouts=Replicate()), 'up': ColwiseParallel(), 'down': RowwiseParallel()}
SERVED_AS = {
    'embed.weight': Shard(0),
    'up.weight': Shard(0),
    'up.bias': Shard(0),
    'down.weight': Shard(1),
    'down.bias': Replicate(),
}
# In the joint group trainers come first. A location is a rank of the job that holds it.
ENDPOINTS = TransferEndpoints(source={rank: rank
                                      for rank in range(TRAINERS)},
                              target={rank: TRAINERS + rank
                                      for rank in range(SERVERS)})


class Model(torch.nn.Module):

    def __init__(self, width):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return hidden + self.down(torch.relu(self.up(hidden)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--width', type=int, default=256, help='size of the hidden states')
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, arguments.width), nprocs=PROCESSES)


def work(process, folder, width):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, 'store'), PROCESSES)
    trains = process < TRAINERS
    job, rank, size = ('trainer', process, TRAINERS) if trains else ('server', process - TRAINERS, SERVERS)
    dist.init_process_group('gloo', store=dist.PrefixStore(job, store), rank=rank, world_size=size)
    wholes = os.path.join(folder, 'wholes.pt')
    with join_transfer_group(store, process, PROCESSES) as group:
        if trains:
            model = trained_model(width)
            keep_wholes(model, wholes)
            move(model, group)
        else:
            model = served_model(width)
            sent = move(model, group)
            compare(model, torch.load(wholes), sent)
    dist.barrier()
    dist.destroy_process_group()


def trained_model(width):
    """The model under FSDP2, after a step."""
    torch.manual_seed(0)
    model = Model(width)
    fully_shard(model, mesh=init_device_mesh('cpu', (TRAINERS, )))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(VOCABULARY).view(1, -1).roll(dist.get_rank(), dims=1)
    model(tokens).square().mean().backward()
    optimizer.step()
    # The forward pass leaves the parameters gathered, which are then no DTensors.
    model.reshard()
    return model


def served_model(width):
    torch.manual_seed(1)
    return parallelize_module(Model(width), init_device_mesh('cpu', (SERVERS, )), PARALLEL)


def move(model, group):
    """Both jobs call it with their models. Returns the bytes that the trainers sent."""
    held, transfers = {}, {}
    for name, parameter in model.named_parameters():
        layout, held[name] = dtensor_map(parameter)
        source = placement_map(parameter.shape, range(TRAINERS), [Shard(0)])
        target = placement_map(parameter.shape, range(SERVERS), [SERVED_AS[name]])
        # What a job says of itself is what the other one takes it for.
        assert layout == (source if group.rank() < TRAINERS else target)
        transfers[name] = ParameterTransfer(target_map=target, source_map=source, source_dtype=DTYPE)
    plan = plan_transfers(transfers, endpoints=ENDPOINTS)
    sends = group.rank() < TRAINERS
    requests = [
        TransferRequest(plan[name], held[name] if sends else {}, {} if sends else held[name], name=name)
        for name in plan
    ]
    execute_transfers(requests, ENDPOINTS, DTYPE, group=group)
    return sum(plan.sent_bytes().values())


def keep_wholes(model, path):
    wholes = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(wholes, path)


def compare(model, wholes, sent):
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor().detach()
        # As integers, because to a comparison of floats 0.0 and -0.0 are equal.
        if not torch.equal(whole.view(torch.int32), wholes[name].view(torch.int32)):
            raise RuntimeError(f'{name} differs between trainer and server.')
    if dist.get_rank() == 0:
        print(
            f'{len(wholes)} parameters moved from FSDP2 on {TRAINERS} processes to TP-{SERVERS} on {SERVERS} others, '
            f'{sent:,} bytes sent; every full_tensor() is the same, bit for bit.')


if __name__ == '__main__':
    main()
