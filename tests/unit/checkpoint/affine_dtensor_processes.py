# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks that lay tensors out with torch's own DTensor, FSDP2 and tensor parallelism, for the adapter's tests."""

import itertools
import math
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from deepspeed.checkpoint.affine import replicated_map
from deepspeed.checkpoint.affine_adapters.dtensor import dtensor_map

PROCESSES = 8
MESHES = (
    [0, 1, 2, 3, 4, 5, 6, 7],
    [1, 5, 6],
    [[0, 1, 2, 3], [4, 5, 6, 7]],
    [[0, 2], [3, 4], [6, 7]],
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
    [[[0, 3, 5]], [[2, 4, 7]]],
)
SHAPES = ((), (1, ), (5, ), (17, ), (0, 3), (3, 7), (9, 8), (2, 3, 5), (1, 16, 2))
# Rows that everything below divides: of other numbers distribute_tensor makes other shards by _StridedShard than FSDP2
# does and full_tensor reads.
EVEN = (288, 6)


@dataclass(frozen=True)
class Case:
    """A tensor's shape, the ranks of its mesh, its placements, and whether torch can put it together again."""
    ranks: list
    placements: tuple
    shape: tuple
    gathers: bool = True


def plain_cases():
    """Every choice of Shard and Replicate."""
    for ranks, shape in itertools.product(MESHES, SHAPES):
        kinds = [Replicate(), *(Shard(axis) for axis in range(len(shape)))]
        for placements in itertools.product(kinds, repeat=np.ndim(ranks)):
            yield Case(ranks, placements, shape)


def strided_cases():
    """Rows cut in every order, and lone _StridedShards."""
    for ranks in MESHES:
        dims = range(np.ndim(ranks))
        for order in itertools.chain(*(itertools.permutations(dims, number + 1) for number in dims)):
            yield Case(ranks, placements_of(order, np.shape(ranks), [Replicate()] * len(dims)), EVEN)
        for other, factor in itertools.product((Replicate(), Shard(0), Shard(1)), (2, 3, 4)):
            yield Case(ranks, (*[other] * (len(dims) - 1), _StridedShard(0, split_factor=factor)), EVEN, gathers=False)


def placements_of(order, mesh_shape, others):
    """The placements by which torch says that mesh dimensions cut axis 0 in this order; the rest has ``others``."""
    placements = list(others)
    for place, mesh_dim in enumerate(order):
        factor = math.prod(mesh_shape[earlier] for earlier in order[:place] if earlier > mesh_dim)
        placements[mesh_dim] = Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor)
    return tuple(placements)


def distribute(world, cases):
    """``(map, {location: flat local tensor})`` of every case, after torch's own functions agreed with it."""
    world.init_default_group()
    meshes = {str(ranks): DeviceMesh('cpu', torch.tensor(ranks)) for ranks in MESHES}
    found = [distribute_one(meshes[str(case.ranks)], case) for case in cases]
    dist.barrier()
    return found


def distribute_one(mesh, case):
    full = torch.arange(math.prod(case.shape)).view(case.shape)
    dtensor = distribute_tensor(full, mesh, list(case.placements))
    layout, buffers = dtensor_map(dtensor)
    inside = dist.get_rank() in mesh.mesh.flatten().tolist()
    assert list(buffers) == ([dist.get_rank()] if inside else [])
    for location, local in buffers.items():
        expected_shape, offset = compute_local_shape_and_global_offset(full.shape, mesh, dtensor.placements)
        assert tuple(local.shape) == layout.shard_shapes[location] == tuple(expected_shape)
        assert local.numel() == 0 or local.flatten()[0] == full[tuple(offset)]
        assert torch.equal(layout.extract(full, location), local)
        assert local.untyped_storage().data_ptr() == dtensor.to_local().untyped_storage().data_ptr()
        assert not case.gathers or torch.equal(dtensor.full_tensor(), full)
    return layout, {location: local.flatten().tolist() for location, local in buffers.items()}


class Perceptron(torch.nn.Module):
    """Two layers, the first cut by rows and the second by columns."""

    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(6, width)
        self.down = torch.nn.Linear(width, 5)

    def forward(self, inputs):
        return self.down(torch.relu(self.up(inputs)))


# Shape and names of the mesh, and the model's width. 'tp' is for tensor parallelism, the others are FSDP2's: one to
# shard, or one to replicate and one to shard.
TRAININGS = (
    ((4, 2), ('dp', 'tp'), 8),
    # FSDP2 cuts what tensor parallelism left: 5 and 4 rows over four ranks, not 9 rows over two times four.
    ((4, 2), ('dp', 'tp'), 9),
    ((4, 2), ('dp', 'tp'), 3),
    ((2, 2, 2), ('replicate', 'shard', 'tp'), 6),
    ((2, 2, 2), ('replicate', 'shard', 'tp'), 7),
    ((8, ), ('shard', ), 9),
    ((4, 2), ('replicate', 'shard'), 5),
)


def train(world):
    """``{parameter: (map, {location: tensor}, whole tensor)}`` of each of the TRAININGS."""
    world.init_default_group()
    results = [train_one(*training) for training in TRAININGS]
    dist.barrier()
    return results


def train_one(mesh_shape, names, width):
    """Maps and buffers are taken before a step of SGD and compared after it."""
    torch.manual_seed(0)
    mesh = init_device_mesh('cpu', mesh_shape, mesh_dim_names=names)
    model = Perceptron(width)
    if 'tp' in names:
        parallelize_module(model, mesh['tp'], {'up': ColwiseParallel(), 'down': RowwiseParallel()})
    others = tuple(name for name in names if name != 'tp')
    fully_shard(model, mesh=mesh[others])
    held = {name: dtensor_map(parameter) for name, parameter in model.named_parameters()}
    before = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    take_step(model, even='tp' not in names or width % mesh['tp'].size() == 0)
    result = {}
    for name, parameter in model.named_parameters():
        layout, buffers = held[name]
        whole = parameter.full_tensor().detach()
        assert not torch.equal(whole, before[name])
        for location, local in buffers.items():
            assert not local.requires_grad
            assert torch.equal(layout.extract(whole, location), local), f'{name} {parameter.placements}'
        result[name] = (layout, buffers, whole)
    return result


def take_step(model, even):
    """Torch's tensor parallelism computes nothing right with a width that it does not divide; then without it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if even:
        # The same inputs on every rank, so that those of one tensor-parallel group agree.
        model(torch.linspace(-1, 1, 24).view(4, 6)).square().mean().backward()
    else:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


# What torch notes of the order in which mesh dimensions cut an axis, since it can be another than left to right.
Cutting = namedtuple('Cutting', ['tensor_dim', 'mesh_dims'])


def peculiar(world):
    """Two ranks with DTensors that are refused, or that need more than a look at their local tensor."""
    world.init_default_group()
    mesh = init_device_mesh('cpu', (2, ))
    refuse(mesh)
    relocate(mesh)
    wait_for_values(mesh)
    reshard_first(mesh)
    dist.barrier()


def refuse(mesh):
    rows = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    with pytest.raises(ValueError,
                       match=r'mesh dimension 0 is Partial\(sum\).* Redistribute .* to Replicate\(\) or Shard'):
        dtensor_map(rows.sum())
    with pytest.raises(TypeError, match='takes a DTensor, but this is a value of type Tensor'):
        dtensor_map(rows.full_tensor())

    height = 3 - 2 * dist.get_rank()
    uneven = DTensor.from_local(torch.ones(height, 2), mesh, [Shard(0)], shape=(4, 2), stride=(2, 1))
    with pytest.raises(ValueError,
                       match=rf'holds a local tensor of shape \({height}, 2\), but a DTensor of shape \(4, 2\)'):
        dtensor_map(uneven)

    nested = distribute_tensor(torch.ones(4, 2), init_device_mesh('cpu', (1, 2)), [Shard(0), Shard(0)])
    nested._spec.shard_order = (Cutting(tensor_dim=0, mesh_dims=(1, 0)), )
    with pytest.raises(ValueError, match=r'Axis 0 of this DTensor is cut over mesh dimensions \(1, 0\) in that order'):
        dtensor_map(nested)

    turned = DeviceMesh('cpu', torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r'mesh dimension 0, .* not ascending, such as \[1, 0\]'):
        dtensor_map(distribute_tensor(torch.arange(4.), turned, [Shard(0)]))
    assert dtensor_map(distribute_tensor(torch.arange(4.), turned, [Replicate()]))[0] == replicated_map((4, ), 2)


def relocate(mesh):
    rows = distribute_tensor(torch.arange(4.), mesh, [Shard(-1)])
    layout, buffers = dtensor_map(rows, locations={0: 5, 1: 4, 2: 9})
    assert dict(layout.shard_shapes) == {5: (2, ), 4: (2, )}
    (location, local), = buffers.items()
    assert (location, local.tolist()) == [(5, [0, 1]), (4, [2, 3])][dist.get_rank()]
    with pytest.raises(ValueError, match='locations has no id for rank 1'):
        dtensor_map(rows, locations={0: 5})


def wait_for_values(mesh):
    rows = distribute_tensor(torch.arange(8.).view(4, 2), mesh, [Shard(0)])
    _, buffers = dtensor_map(rows.redistribute(mesh, [Replicate()], async_op=True))
    local, = buffers.values()
    assert type(local) is torch.Tensor and local.flatten().tolist() == list(range(8))


def reshard_first(mesh):
    layer = torch.nn.Linear(3, 4)
    fully_shard(layer, mesh=mesh)
    layer(torch.ones(1, 3))
    with pytest.raises(TypeError, match=r'type Parameter. Where FSDP2 has gathered a parameter, call reshard\(\)'):
        dtensor_map(layer.weight)
    layer.reshard()
    assert dtensor_map(layer.weight)[0].shard_shapes == {0: (2, 3), 1: (2, 3)}
