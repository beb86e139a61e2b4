# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A trainer: makes the optimizer step, leaves the whole parameters as a reference, and sends its partitions."""

import pathlib

import torch

from ds_affine.demo.layouts import moves, source_locations
from ds_affine.demo.model import parameter_shapes
from ds_affine.demo.training import train_with_deepspeed, train_with_torch
from ds_affine.demo.transfer import joint_group, move_all

REFERENCE_FILE = "reference.pt"
REFERENCE_READY = "reference is written"


def work(assignment, store):
    locations = source_locations(parameter_shapes())
    train = train_with_deepspeed if assignment.use_deepspeed else train_with_torch
    trained = train(assignment.rank, locations)
    if assignment.rank == 0:
        torch.save(trained.full, pathlib.Path(assignment.folder) / REFERENCE_FILE)
        store.set(REFERENCE_READY, "1")
    group = joint_group(assignment, store)
    return move_all(moves(trained.maps, locations), trained.buffers, {}, locations, group)
