# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Processes 0 and 1 train a weight in ZeRO-3 partitions, 2 and 3 serve it in column shards."""

import sys

import torch

from deepspeed.checkpoint.affine import contiguous_split_map, zero3_partition_map
from deepspeed.checkpoint.affine_transfer import ParameterTransfer, TransferEndpoints, plan_transfers
from deepspeed.checkpoint.affine_transfer_executor import TransferBrokenError, compile_transfer, join_transfer_group

rank, steps, shape = int(sys.argv[1]), 3, (6, 4)
trains = rank < 2
owners = TransferEndpoints(source={0: 0, 1: 1}, target={0: 2, 1: 3})  # location: process
transfer = ParameterTransfer(contiguous_split_map(shape, [2, 2], 1), zero3_partition_map(shape, 2), torch.float32)
plan = plan_transfers({'up': transfer}, endpoints=owners)

# {name: {location: tensor}}, of the locations that are on this process.
sources = {'up': {rank: torch.zeros(12)}} if trains else {}
targets = {} if trains else {'up': {rank - 2: torch.zeros(6, 2)}}
try:
    with join_transfer_group('127.0.0.1:29511', rank, 4) as group:
        program = compile_transfer(plan, sources, targets, owners, torch.float32, group=group)
        for step in range(steps):
            if trains:
                sources['up'][rank] += 1  # in place of an optimizer step
            program.run()
            if not trains:
                print(f'server {rank - 2}, step {step}: {targets["up"][rank - 2].sum():g}')
except TransferBrokenError as error:
    sys.exit(f'a peer died or was late: {error}')
