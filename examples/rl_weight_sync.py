# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Reinforcement learning in small: a ZeRO-3 trainer pushes its weights to two rollout servers after every step.

Six processes on one machine, CPU is enough::

    pip install deepspeed transformers deepspeed-affine
    torchrun --standalone --nproc-per-node 6 examples/rl_weight_sync.py

Processes 0 and 1 train a Llama with DeepSpeed ZeRO-3. Processes 2 to 5 are two servers of two tensor-parallel ranks
each, in plain torch: q, k, v and gate, up are fused, the one key/value head is on both ranks, the vocabulary is
padded. Trainers and servers are jobs with a world each; a third group, for transfers only, joins them.

In a round the weights go to the servers, each server writes sequences, and the trainer with its number takes them for
a policy gradient step. It also computes their logits itself: they must agree with the server's. The last column says
how far apart they would be had the weights of this round not been sent.
"""

import argparse
import io
import os
import sys
import warnings

import torch
import torch.distributed as dist

from deepspeed.checkpoint.affine.partitions import zero3_partition_map
from deepspeed.checkpoint.affine_adapters.server import DecoderModel, server_layout
from deepspeed.checkpoint.affine_adapters.zero3 import zero3_maps
from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.model import plan_transfers
from deepspeed.checkpoint.affine_transfer_executor.compiler import compile_transfer
from deepspeed.checkpoint.affine_transfer_executor.group import join_transfer_group
from tensor_parallel_llama import NORM_EPSILON, ROPE_BASE, TensorParallelLlama

TRAINERS, SERVERS, TP_DEGREE = 2, 2, 2
PROCESSES = TRAINERS + SERVERS * TP_DEGREE
DTYPE = torch.float32
BATCH, PROMPT, LENGTH = 8, 4, 16
LEARNING_RATE = 0.003


def main():
    arguments = parse_arguments()
    store, process, size = next(dist.rendezvous('env://'))
    if size != PROCESSES:
        raise SystemExit(f'Started with {size} processes; this example needs --nproc-per-node {PROCESSES}.')
    with join_transfer_group(store, process, PROCESSES) as group:
        work = train if process < TRAINERS else serve
        agreed = work(arguments, process, store, group)
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # A ZeRO-3 process on CPU can abort while Python shuts down; all is said and done here.
    os._exit(0 if agreed else 1)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--steps', type=int, default=4, help='optimizer steps')
    parser.add_argument('--layers', type=int, default=2)
    parser.add_argument('--heads', type=int, default=4, help='query heads of 16 elements each, an even number')
    parser.add_argument('--vocabulary', type=int, default=101)
    return parser.parse_args()


def described_model(arguments):
    hidden = 16 * arguments.heads
    return DecoderModel(hidden_size=hidden,
                        intermediate_size=3 * hidden,
                        num_hidden_layers=arguments.layers,
                        num_attention_heads=arguments.heads,
                        num_key_value_heads=1,
                        head_dim=16,
                        vocab_size=arguments.vocabulary)


def servers_layout(model):
    """Where both servers keep the parameters; the locations of each follow those of the one before."""
    locations = range(SERVERS * TP_DEGREE)
    return server_layout(model,
                         TP_DEGREE,
                         locations=[locations[first:first + TP_DEGREE] for first in locations[::TP_DEGREE]])


def compile_sync(layout, sources, served, group):
    """The program that sends the weights; every process makes it once, and runs it together with the others.

    Args:
        layout: ``ServerLayout``.
        sources: Hugging Face name -> ``{location: tensor}``: a trainer's partitions; ``{}`` on a server.
        served: server parameter name -> ``{location: tensor}``: a server's tensors; ``{}`` on a trainer.
        group: of all processes.
    """
    endpoints = TransferEndpoints(
        source={rank: rank
                for rank in range(TRAINERS)},
        target={location: TRAINERS + location
                for location in range(SERVERS * TP_DEGREE)},
    )
    source_maps = {
        name: zero3_partition_map(part.target_map.logical_shape, TRAINERS)
        for name, part in layout.parts.items()
    }
    # Each process plans what it sends or receives itself, however many there are. With a plan of all processes the
    # servers would pass on to each other what both need.
    plan = plan_transfers(layout.transfers(source_maps, DTYPE), endpoints=endpoints, process=group.rank())
    return compile_transfer(plan, sources, layout.buffers(served), endpoints, DTYPE, group=group)


# ---------------------------------------------------------------------------------------------- the trainer


def train(arguments, rank, store, group):
    """Return whether the logits agreed in every round."""
    model = described_model(arguments)
    engine = zero3_engine(model, rank, store)
    # Views of the engine's own partitions: they show the weights after every step.
    held, layout = zero3_maps(engine), servers_layout(model)
    sync = compile_sync(layout, {name: held[name].buffers for name in layout.parts}, {}, group)
    if rank == 0:
        print('round  reward  logits apart  without the last sync', flush=True)
    agreed, previous = True, None
    for step in range(arguments.steps + 1):
        stale = None if previous is None else apart(engine, *previous)
        sent = sync.run()
        tokens, served = load(store, f'sequences of server {rank} in round {step}')
        logits = engine(tokens).logits
        agreed &= torch.allclose(logits, served, rtol=1e-4, atol=1e-5)
        reward = (tokens[:, PROMPT:] < model.vocab_size // 2).float().mean(1)
        if rank == 0:
            distance = (logits - served).abs().max().item()
            print(f'{step:5}  {reward.mean():6.3f}  {distance:12.1e}  {"" if stale is None else f"{stale:.1e}"}',
                  flush=True)
        if step < arguments.steps:
            engine.backward(policy_loss(logits, tokens, reward))
            engine.step()
        previous = tokens, served
    if rank == 0:
        print(f'{len(layout.parts)} parameters; trainer 0 sent {sent.sent_bytes:,} bytes in each round')
    if not agreed:
        print(f'Trainer {rank} and its server do not agree.', flush=True)
    return agreed


def zero3_engine(model, rank, store):
    """A Llama with random weights under ZeRO-3, in a world of the trainers alone."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(TRAINERS), DS_ACCELERATOR='cpu')
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM
    # DeepSpeed still uses names that newer releases of torch deprecate; each use would be printed.
    warnings.simplefilter('ignore', FutureWarning)
    # DeepSpeed would compile its shared-memory collectives first; gloo does here.
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    dist.init_process_group('gloo', store=dist.PrefixStore('trainers', store), rank=rank, world_size=TRAINERS)
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(hidden_size=model.hidden_size,
                    intermediate_size=model.intermediate_size,
                    num_hidden_layers=model.num_hidden_layers,
                    num_attention_heads=model.num_attention_heads,
                    num_key_value_heads=model.num_key_value_heads,
                    head_dim=model.head_dim,
                    vocab_size=model.vocab_size,
                    rms_norm_eps=NORM_EPSILON,
                    rope_theta=ROPE_BASE,
                    tie_word_embeddings=False))
    config = {
        'train_micro_batch_size_per_gpu': BATCH,
        'zero_optimization': {
            'stage': 3
        },
        'zero_allow_untested_optimizer': True
    }
    optimizer = torch.optim.AdamW(llama.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=llama, optimizer=optimizer, config=config)
    return engine


def apart(engine, tokens, served):
    """How far the trainer's logits are from those that a server had for the same sequences."""
    with torch.no_grad():
        return (engine(tokens).logits - served).abs().max().item()


def policy_loss(logits, tokens, reward):
    """Sequences with more reward than the others become likelier."""
    likelihood = logits[:, PROMPT - 1:-1].log_softmax(-1).gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)
    return -((reward - reward.mean())[:, None] * likelihood).mean()


# ---------------------------------------------------------------------------------------------- the servers


def serve(arguments, process, store, group):
    """Write sequences after every sync; the trainer is the one who compares."""
    location = process - TRAINERS
    server, rank = divmod(location, TP_DEGREE)
    world = dist.PrefixStore(f'server {server}', store)
    dist.init_process_group('gloo', store=world, rank=rank, world_size=TP_DEGREE)
    model = described_model(arguments)
    layout = servers_layout(model)
    weights = {name: torch.zeros(shape, dtype=DTYPE) for name, shape in layout.shard_shapes.items()}
    sync = compile_sync(layout, {}, {name: {location: tensor} for name, tensor in weights.items()}, group)
    llama = TensorParallelLlama(model, weights)
    generator = torch.Generator().manual_seed(server)
    for step in range(arguments.steps + 1):
        sync.run()
        prompts = torch.randint(model.vocab_size, (BATCH, PROMPT), generator=generator)
        tokens = llama.generate(prompts, LENGTH, generator)
        logits = llama.logits(tokens)
        if rank == 0:
            save(store, f'sequences of server {server} in round {step}', (tokens, logits))
    return True


def save(store, key, tensors):
    data = io.BytesIO()
    torch.save(tensors, data)
    store.set(key, data.getvalue())


def load(store, key):
    return torch.load(io.BytesIO(store.get(key)))


if __name__ == '__main__':
    main()
