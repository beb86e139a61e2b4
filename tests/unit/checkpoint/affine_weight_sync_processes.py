# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks of a ZeRO-3 trainer and of a tensor-parallel server whose weights it sends after every optimizer step.

Needs DeepSpeed. Trainers and server are jobs of their own, joined by a group for transfers.
"""

import ctypes
import gc
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from affine_processes import World
from affine_zero_processes import config, start
from deepspeed.checkpoint.affine.partitions import zero3_partition_map
from deepspeed.checkpoint.affine_adapters.server import DecoderModel, server_layout
from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.model import plan_transfers
from deepspeed.checkpoint.affine_transfer_executor.compiler import compile_transfer
from deepspeed.checkpoint.affine_transfer_executor.group import join_transfer_group
from deepspeed.checkpoint.affine_transfer_executor.requests import StagingBudget

TRAINERS, SERVERS = 2, 2
PROCESSES = TRAINERS + SERVERS
STEPS = 5
DTYPE = torch.bfloat16
LEARNING_RATE = 1e-2
TOKENS = 16
STAGING_CAP = 8 << 20
# One key/value head, which both ranks of the server have, and a vocabulary that is padded.
MODEL = DecoderModel(hidden_size=512,
                     intermediate_size=1408,
                     num_hidden_layers=4,
                     num_attention_heads=8,
                     num_key_value_heads=1,
                     head_dim=64,
                     vocab_size=24001)
VOCABULARY_MULTIPLE = 64
UNTOUCHED = -1
ENDPOINTS = TransferEndpoints(source={rank: rank
                                      for rank in range(TRAINERS)},
                              target={rank: TRAINERS + rank
                                      for rank in range(SERVERS)})


@dataclass(frozen=True)
class Case:
    """A way to send the weights: whether each process plans its own part alone, the steps after which the weights are
    sent, and what else ``compile_transfer`` is told."""
    alone: bool
    steps: range
    options: dict


CASES = {
    "planned for all": Case(False, range(1, STEPS + 1), {}),
    "planned alone": Case(True, range(1, STEPS + 1), {}),
    "staged and verified": Case(True, range(3, 4), {
        "staged": True,
        "verify": True
    }),
}


def run(world, folder):
    """What a rank of either job saw, see ``_train`` and ``_serve``."""
    with join_transfer_group(world.store("sync"), world.rank, PROCESSES) as group:
        report = (_train if world.rank < TRAINERS else _serve)(world, group, Path(folder, "gathered.pt"))
        # Nobody leaves while another may still wait.
        world.store("ended").set(str(world.rank), "")
        world.store("ended").wait([str(rank) for rank in range(PROCESSES)])
    return report


# ---------------------------------------------------------------------------------------------- the trainer


def _train(world, group, gathered):
    """{case: bytes added by its compilation, then by each of its runs}, with the reports of the runs."""
    from deepspeed.checkpoint.affine_adapters.zero3 import zero3_maps
    deepspeed = start(World(world.rank, TRAINERS, world.port))
    engine = _engine(deepspeed)
    # Without the buffers of the module, for which a server has no place.
    held = {name: one for name, one in zero3_maps(engine).items() if name in _layout().parts}
    sources = {name: one.buffers for name, one in held.items()}
    maps = {name: one.layout for name, one in held.items()}
    # The first step makes the optimizer's memory, which is no part of a transfer.
    _take_step(engine, world.rank, 0)
    added, stats, programs = {case: [] for case in CASES}, {case: [] for case in CASES}, {}
    for case in CASES:
        with _peak_above(added[case]):
            programs[case] = _compile(case, group, maps, sources, {})
    for step in range(1, STEPS + 1):
        _take_step(engine, world.rank, step)
        for case in CASES:
            if step in CASES[case].steps:
                with _peak_above(added[case]):
                    stats[case].append(programs[case].run())
        _save_gathered(deepspeed, engine, gathered)
        world.store("saved").set(str(step), "")
    return {"added": added, "stats": stats}


def _engine(deepspeed):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(5)
    llama = LlamaForCausalLM(
        LlamaConfig(hidden_size=MODEL.hidden_size,
                    intermediate_size=MODEL.intermediate_size,
                    num_hidden_layers=MODEL.num_hidden_layers,
                    num_attention_heads=MODEL.num_attention_heads,
                    num_key_value_heads=MODEL.num_key_value_heads,
                    head_dim=MODEL.head_dim,
                    vocab_size=MODEL.vocab_size,
                    max_position_embeddings=TOKENS,
                    tie_word_embeddings=False))
    optimizer = torch.optim.AdamW(llama.parameters(), lr=LEARNING_RATE)
    settings = config(3, "bf16", reduce_bucket_size=2**22)
    engine, *_ = deepspeed.initialize(model=llama, optimizer=optimizer, config=settings)
    return engine


def _take_step(engine, rank, step):
    tokens = torch.randint(MODEL.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(10 * step + rank))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def _save_gathered(deepspeed, engine, path):
    """The whole parameters as DeepSpeed itself gathers them."""
    full = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            full[name] = parameter.detach().clone()
    if torch.distributed.get_rank() == 0:
        torch.save(full, path)
    torch.distributed.barrier()


# ---------------------------------------------------------------------------------------------- the server


def _serve(world, group, gathered):
    """{case: the differences after each of its runs}: names of the parameters that are not what a loader cuts from the
    gathered ones, and of those that are as they were before the step."""
    from test_affine_server_adapter import Loader
    rank = world.rank - TRAINERS
    loader = Loader(MODEL, SERVERS, VOCABULARY_MULTIPLE, rank)
    layout = _layout()
    maps = {name: zero3_partition_map(part.target_map.logical_shape, TRAINERS) for name, part in layout.parts.items()}
    served = {
        case: {
            name: torch.full(shape, UNTOUCHED, dtype=DTYPE)
            for name, shape in layout.shard_shapes.items()
        }
        for case in CASES
    }
    programs = {}
    for case, tensors in served.items():
        targets = layout.buffers({name: {rank: tensor} for name, tensor in tensors.items()})
        programs[case] = _compile(case, group, maps, {}, targets)
    seen, before = {case: [] for case in CASES}, {}
    for step in range(1, STEPS + 1):
        sent = [case for case in CASES if step in CASES[case].steps]
        for case in sent:
            programs[case].run()
        world.store("saved").wait([str(step)])
        expected = loader.load(torch.load(gathered))
        for case in sent:
            seen[case].append({
                "compared": len(expected),
                "differ": _differing(expected, served[case]),
                "unchanged": [name for name in before if torch.equal(before[name], expected[name])]
            })
        before = expected
    return seen


def _differing(expected, tensors):
    assert expected.keys() == tensors.keys()
    return [name for name in expected if not torch.equal(expected[name], tensors[name])]


# ---------------------------------------------------------------------------------------------- both


def _layout():
    return server_layout(MODEL, SERVERS, vocab_multiple=VOCABULARY_MULTIPLE)


def _compile(case, group, source_maps, sources, targets):
    """A process brings its sources or its targets, ``{}`` for the other side."""
    process = group.rank() if CASES[case].alone else None
    plan = plan_transfers(_layout().transfers(source_maps, DTYPE), endpoints=ENDPOINTS, process=process)
    return compile_transfer(plan,
                            sources,
                            targets,
                            ENDPOINTS,
                            DTYPE,
                            group=group,
                            budget=StagingBudget(bytes_per_process=STAGING_CAP),
                            **CASES[case].options)


@contextmanager
def _peak_above(added):
    """Append by how many bytes the most resident memory inside is above that before.

    What Python and malloc keep of freed memory is given back first: used again, it would hide what is added. Code that
    runs for the first time is read from its library; these pages are the kernel's to drop, and are not counted.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, files = _resident("VmRSS"), _resident("RssFile")
    # Linux: the peak is counted from here on.
    Path("/proc/self/clear_refs").write_text("5")
    yield
    added.append(_resident("VmHWM") - before - (_resident("RssFile") - files))


def _resident(kind):
    return int(re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
