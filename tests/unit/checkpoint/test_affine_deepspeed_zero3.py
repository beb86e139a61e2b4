# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The adapter on parameters of a real ZeRO-3 engine on three ranks."""

import math
import multiprocessing

import pytest
import torch.distributed as dist

import affine_zero3_processes as ranks
from deepspeed.checkpoint.affine import ParamAffineMap, zero3_partition_map

WORLD_SIZE = 3
LOCATIONS = [30, 10, 20]


@pytest.fixture(scope="module")
def entries():
    """What every rank saw after each step: entries[rank][step][parameter]."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(WORLD_SIZE)]
    processes = [
        context.Process(target=ranks.run, args=(rank, WORLD_SIZE, store.port, pipes[rank][1]), daemon=True)
        for rank in range(WORLD_SIZE)
    ]
    try:
        for process, (_, sending) in zip(processes, pipes):
            process.start()
            sending.close()
        return [_answer(receiving) for receiving, _ in pipes]
    finally:
        for process in processes:
            process.join(20)
            process.kill()


def _answer(receiving):
    assert receiving.poll(240), "a rank has not answered"
    outcome, content = receiving.recv()
    assert outcome == "done", content
    return content


@pytest.mark.parametrize("name", ranks.SHAPES)
def test_map_is_that_of_the_partitions_on_every_rank(entries, name):
    expected = zero3_partition_map(ranks.SHAPES[name], WORLD_SIZE, locations=LOCATIONS).to_dict()
    assert [steps[0][name]["map"] for steps in entries] == [expected] * WORLD_SIZE


@pytest.mark.parametrize("name", ranks.SHAPES)
@pytest.mark.parametrize("step", range(ranks.STEPS))
def test_buffer_holds_this_ranks_elements_after_each_step(entries, name, step):
    """By plain slicing of the gathered parameter; the buffers were taken before the first step."""
    per_rank = math.ceil(math.prod(ranks.SHAPES[name]) / WORLD_SIZE)
    for rank, steps in enumerate(entries):
        entry = steps[step][name]
        assert entry["location"] == LOCATIONS[rank]
        assert entry["is_a_view"]
        assert entry["buffer"] == entry["full"][rank * per_rank:(rank + 1) * per_rank]
        assert len(entry["buffer"]) == math.prod(ParamAffineMap.from_dict(entry["map"]).shard_shapes[LOCATIONS[rank]])


def test_steps_changed_what_is_trained_and_only_that(entries):
    first, second = (entries[0][step] for step in range(2))
    changed = {name for name in ranks.SHAPES if first[name]["full"] != second[name]["full"]}
    assert changed == set(ranks.SHAPES) - {"frozen"}
