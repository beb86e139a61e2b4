# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The maps of DTensors: against torch itself in real processes, and against torch.chunk element by element."""

import math
import os
import pathlib
import subprocess
import sys
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import affine_dtensor_processes as processes
from affine_oracle import check_map, element_grid, is_maximally_merged
from affine_processes import run_processes
from deepspeed.checkpoint.affine import contiguous_split_map, replicated_map, zero3_partition_map
from deepspeed.checkpoint.affine_adapters.placements import placement_map
from deepspeed.checkpoint.affine_transfer import plan_transfer

EXAMPLE = pathlib.Path(__file__).resolve().parents[3] / "examples" / "fsdp2_to_tp.py"

# ---------------------------------------------------------------------------------------- real processes


def test_maps_agree_with_distribute_tensor():
    plain, strided = list(processes.plain_cases()), list(processes.strided_cases())
    assert len(plain) >= 500 and len(strided) >= 40
    cases = plain + strided
    by_rank = run_processes(processes.PROCESSES, processes.distribute, cases, timeout=280)
    for case, found in zip(cases, zip(*by_rank)):
        layouts = [layout for layout, _ in found]
        assert all(layout == layouts[0] for layout in layouts), case
        contents = {location: np.array(local) for _, buffers in found for location, local in buffers.items()}
        assert list(layouts[0].shard_shapes) == torch.tensor(case.ranks).flatten().tolist()
        check_map(layouts[0], contents)


def test_maps_agree_with_fsdp2_and_tensor_parallelism():
    by_rank = run_processes(processes.PROCESSES, processes.train, timeout=280)
    for training, held in zip(processes.TRAININGS, zip(*by_rank)):
        for name in ("up.weight", "up.bias", "down.weight", "down.bias"):
            layout, _, whole = held[0][name]
            assert all(rank[name][0] == layout for rank in held), training
            shards = {location: local for rank in held for location, local in rank[name][1].items()}
            assert sorted(shards) == list(range(processes.PROCESSES))
            layout.validate_coverage()
            assert torch.equal(layout.rebuild(shards), whole), training


def test_peculiar_dtensors():
    assert run_processes(2, processes.peculiar) == [None, None]


def test_example_moves_an_fsdp2_model_to_tensor_parallel_shards(tmp_path):
    done = subprocess.run([sys.executable, str(EXAMPLE), "--width", "8"],
                          cwd=tmp_path,
                          env=dict(os.environ, OMP_NUM_THREADS="1"),
                          capture_output=True,
                          text=True,
                          timeout=280)
    assert done.returncode == 0, done.stderr
    # Four bytes for each element of embedding, up and down, and for one more copy of down's replicated bias.
    sent = 4 * (101 * 8 + 2 * 8 * 32 + 32 + 2 * 8)
    assert f"5 parameters moved from FSDP2 on 2 processes to TP-2 on 2 others, {sent:,} bytes sent" in done.stdout
    assert "every full_tensor() is the same, bit for bit." in done.stdout


# -------------------------------------------------------------------------------- torch.chunk as the oracle


def chunk(ids, dim, chunks, number):
    parts = torch.chunk(ids, chunks, dim)
    return parts[number] if number < len(parts) else ids.narrow(dim, 0, 0)


def take(ids, placement, size, number):
    """What a rank keeps of its elements when one mesh dimension cuts them."""
    if isinstance(placement, Replicate):
        return ids
    blocks = [chunk(ids, placement.dim, placement.split_factor, block)
              for block in range(placement.split_factor)] if isinstance(placement, _StridedShard) else [ids]
    return torch.cat([chunk(block, placement.dim, size, number) for block in blocks], placement.dim)


def contents_of(shape, mesh, steps):
    """What every rank stores after the mesh dimensions cut one after the other.

    steps: ``(mesh_dim, placement)`` in the order of cutting.
    """
    contents = {}
    for place, rank in np.ndenumerate(mesh):
        ids = torch.from_numpy(element_grid(shape))
        contents[int(rank)] = reduce(lambda held, step: take(held, step[1], mesh.shape[step[0]], place[step[0]]),
                                     steps, ids).reshape(-1).numpy()
    return contents


@st.composite
def meshes(draw, most_axes=3):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=most_axes))
    ranks = draw(st.permutations(range(math.prod(sizes) + 2)))
    return np.array(ranks[:math.prod(sizes)]).reshape(sizes)


def shapes(axes, multiple=1):
    return st.tuples(*[st.integers(0, max(24 // multiple, 2)).map(lambda size: size * multiple)] +
                     [st.integers(0, 6)] * (axes - 1))


def mixed(placements):
    return st.sampled_from([*placements, Replicate(), Shard(1)])


def check(shape, mesh, placements, steps):
    layout = placement_map(shape, mesh, placements)
    check_map(layout, contents_of(shape, mesh, steps))
    assert is_maximally_merged(layout)


@settings(max_examples=300)
@given(st.data(), meshes())
def test_shards_are_chunks_of_chunks(data, mesh):
    shape = data.draw(st.integers(0, 3).flatmap(lambda axes: shapes(axes) if axes else st.just(())))
    kinds = [Replicate(), *(Shard(axis) for axis in range(len(shape)))]
    placements = data.draw(st.tuples(*[st.sampled_from(kinds)] * mesh.ndim))
    check(shape, mesh, placements, list(enumerate(placements)))


def draw_order(data, mesh):
    """Mesh dimensions that cut axis 0 in any order, and the placements by which torch expresses it."""
    cutting = data.draw(st.lists(st.sampled_from(range(mesh.ndim)), min_size=1, unique=True))
    placements = processes.placements_of(cutting, mesh.shape, [data.draw(mixed([])) for _ in range(mesh.ndim)])
    others = [mesh_dim for mesh_dim in range(mesh.ndim) if mesh_dim not in cutting]
    steps = [(mesh_dim, Shard(0)) for mesh_dim in cutting] + [(mesh_dim, placements[mesh_dim]) for mesh_dim in others]
    return placements, steps


@settings(max_examples=300)
@given(st.data(), meshes(), shapes(2))
def test_split_factors_tell_the_order_of_cutting(data, mesh, shape):
    placements, steps = draw_order(data, mesh)
    check(shape, mesh, placements, steps)


@settings(max_examples=150)
@given(st.data(), meshes())
def test_of_sizes_that_divide_strided_shards_hold_their_part_of_every_block(data, mesh):
    placements, _ = draw_order(data, mesh)
    shape = data.draw(shapes(2, multiple=mesh.size))
    check(shape, mesh, placements, list(enumerate(placements)))


@settings(max_examples=200)
@given(st.data(), meshes(), shapes(2), st.integers(2, 7))
def test_strided_shard_without_its_counterpart(data, mesh, shape, factor):
    """Nothing to its right cuts the axis, so its split factor tells no order."""
    place = data.draw(st.integers(0, mesh.ndim - 1))
    left = [data.draw(mixed([Shard(0), _StridedShard(0, split_factor=3)])) for _ in range(place)]
    right = [data.draw(mixed([])) for _ in range(place + 1, mesh.ndim)]
    placements = [*left, _StridedShard(0, split_factor=factor), *right]
    check(shape, mesh, placements, list(enumerate(placements)))


# ------------------------------------------------------------------------------------------ simple cases


def test_one_mesh_dimension_is_a_split_or_a_replica():
    assert placement_map((8, 3), [0, 1], [Shard(0)]) == contiguous_split_map((8, 3), [4, 4], 0)
    assert placement_map((8, 5), [0, 1], [Shard(-1)]) == contiguous_split_map((8, 5), [3, 2], 1)
    assert placement_map((8, 3), [0, 1], [Replicate()]) == replicated_map((8, 3), 2)
    assert placement_map((), [0, 1], [Replicate()]) == replicated_map((), 2)


def test_mesh_may_be_a_tensor_and_locations_are_by_rank():
    layout = placement_map((4, ),
                           torch.tensor([[3, 1]], dtype=torch.int32), [Replicate(), Shard(0)],
                           locations={
                               1: 10,
                               3: 30,
                               7: 70
                           })
    assert {at: pieces[0].source_offset for at, pieces in layout.pieces_by_rank.items()} == {30: 0, 10: 2}


def test_large_mesh_has_a_piece_per_shard():
    mesh = np.arange(16384).reshape(512, 4, 8)
    shape = (2**20, 2**14)
    layout = placement_map(shape, mesh, [_StridedShard(0, split_factor=8), Shard(1), Shard(0)])
    assert layout.columns.piece_count == mesh.size
    layout.validate_coverage()
    assert layout.shard_shapes[16383] == (2**20 // 4096, 2**14 // 4)
    assert layout.pieces_by_rank[16383][0].source_offset == (2**20 - 2**8) * 2**14 + 3 * 2**12


def test_plans_from_and_to_a_mesh():
    source = placement_map((7, 6), [[0, 1], [2, 3], [4, 5]], [_StridedShard(0, split_factor=2), Shard(0)])
    target = zero3_partition_map((7, 6), 3)
    assert plan_transfer(target_map=target, source_map=source).moved_elements == 42
    assert plan_transfer(target_map=source, source_map=target).moved_elements == 42


# ---------------------------------------------------------------------------------------------- refusals


class Interleaved(Shard):
    pass


@pytest.mark.parametrize("shape, mesh, placements, locations, error, match", [
    ((4, ), [0, 1], [Partial()], None, ValueError, r"dimension 0 is Partial\(sum\).*Redistribute the tensor to Repl"),
    ((4, ), [0, 1], [Partial("max")], None, ValueError, r"dimension 0 is Partial\(max\)"),
    ((4, ), [0, 1], [Interleaved(0)], None, TypeError, "dimension 0 is a Interleaved; expected Shard, Replicate"),
    ((4, ), [0, 1], ["Shard(0)"], None, TypeError, "dimension 0 is a str"),
    ((4, ), [0, 1], [Shard(0), Replicate()], None, ValueError, r"2 placements for a mesh of shape \(2,\)"),
    ((4, ), [[0, 1]], [Replicate(), Shard(1)], None, IndexError, "mesh dimension 1: dim is 1, but .* has 1 axes"),
    ((), [0, 1], [Shard(0)], None, IndexError, "dim is 0, but .* has 0 axes"),
    ((4, ), [0, 1], [_StridedShard(0, split_factor=0)], None, ValueError, "split_factor is 0"),
    ((4, ), [0, 1, 0], [Shard(0)], None, ValueError, r"mesh_ranks of shape \(3,\) has rank 0 twice"),
    ((4, ), np.zeros((0, 2), int), [Replicate(), Shard(0)], None, ValueError, r"shape \(0, 2\) has no rank"),
    ((4, ), [0., 1.], [Shard(0)], None, TypeError, "array of integers, but its dtype is float64"),
    ((4, ), [0, 1], [Shard(0)], {
        0: 0
    }, ValueError, r"no id for rank 1; .* \[0, 1\]"),
    ((4, ), [0, 1], [Shard(0)], {
        0: 7,
        1: 7
    }, ValueError, "gives 7 to the ranks 0 and 1"),
    ((4, ), [0, 1], [Shard(0)], [0, 1], TypeError, "locations must be a mapping"),
    ((-4, ), [0, 1], [Shard(0)], None, ValueError, "negative size"),
])
def test_refusals(shape, mesh, placements, locations, error, match):
    with pytest.raises(error, match=match):
        placement_map(shape, mesh, placements, locations=locations)
