# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Training under tensor parallelism is saved, and resumed without it: the losses go on as if nothing had happened.

It starts its own processes, one job after the other; CPU is enough::

    pip install deepspeed transformers deepspeed-affine
    python examples/resume_other_tp.py

A Llama is trained with DeepSpeed AutoTP on two tensor-parallel ranks and saves a checkpoint on its way. DeepSpeed's
converter makes a universal checkpoint of it, and one process resumes from that. AutoTP says in the checkpoint how each
parameter is cut, as an affine map; the converter puts the shards together by it. Where ``deepspeed-affine`` is
installed beside DeepSpeed these are its maps. The vocabulary is cut unevenly.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TP_DEGREE, RESUMED_DEGREE = 2, 1
BATCH, LENGTH = 4, 16
LEARNING_RATE = 0.003
TAG, UNIVERSAL = 'saved', 'saved_universal'


def main():
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted = losses_of_job(arguments, folder, TP_DEGREE, resumes=False)
        convert(folder)
        resumed = losses_of_job(arguments, folder, RESUMED_DEGREE, resumes=True)
    going_on = uninterrupted[arguments.save_after:]
    agreed = len(resumed) == len(going_on) > 0 and all(
        math.isclose(one, other, rel_tol=1e-5) for one, other in zip(resumed, going_on))
    apart = max(abs(one - other) for one, other in zip(resumed, going_on))
    print(f'Saved at TP-{TP_DEGREE} after step {arguments.save_after}, resumed at TP-{RESUMED_DEGREE}: the losses of '
          f'{len(resumed)} more steps differ by {apart:.1e} at most from those of the uninterrupted run.')
    sys.exit(0 if agreed else 'They do not agree.')


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--steps', type=int, default=5, help='optimizer steps')
    parser.add_argument('--save-after', type=int, default=2, help='how many of them the checkpoint holds')
    parser.add_argument('--layers', type=int, default=2)
    parser.add_argument('--heads', type=int, default=4, help='query heads of 16 elements each, an even number')
    parser.add_argument('--vocabulary', type=int, default=101)
    arguments = parser.parse_args()
    if not 0 < arguments.save_after < arguments.steps:
        parser.error('--save-after must be from 1 to one less than --steps')
    return arguments


def losses_of_job(arguments, folder, degree, resumes):
    """Train in as many processes; returns the loss of each step."""
    path = os.path.join(folder, f'losses at {degree}')
    mp.spawn(train, (arguments, folder, degree, resumes, path), nprocs=degree)
    with open(path) as file:
        return json.load(file)


def convert(folder):
    command = [sys.executable, '-m', 'deepspeed.checkpoint.ds_to_universal']
    paths = ['--input_folder', os.path.join(folder, TAG), '--output_folder', os.path.join(folder, UNIVERSAL)]
    converter = subprocess.run(command + paths, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if converter.returncode:
        sys.exit(f'The converter failed:\n{converter.stdout}')


def train(rank, arguments, folder, degree, resumes, path):
    """One rank of a job: train, and save on the way; or load what was saved, and go on."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(degree), DS_ACCELERATOR='cpu')
    store = dist.FileStore(os.path.join(folder, f'store of {degree}'), degree)
    dist.init_process_group('gloo', store=store, rank=rank, world_size=degree)
    engine = autotp_engine(arguments, degree, resumes)
    if resumes:
        engine.load_checkpoint(folder, tag=UNIVERSAL)
    losses = []
    for step in range(engine.global_steps, arguments.steps):
        losses.append(take_step(engine, step, arguments.vocabulary))
        if engine.global_steps == arguments.save_after:
            engine.save_checkpoint(folder, tag=TAG)
    if rank == 0:
        with open(path, 'w') as file:
            json.dump(losses, file)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # A process of DeepSpeed on CPU can abort while Python shuts down; all is said and done here.
    os._exit(0)


def autotp_engine(arguments, degree, resumes):
    """A Llama with random weights, of which each rank gets its tensor-parallel shards."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM
    # DeepSpeed still uses names that newer releases of torch deprecate; each use would be printed.
    warnings.simplefilter('ignore', FutureWarning)
    # DeepSpeed would compile its shared-memory collectives first; gloo does here.
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    # A job that resumes begins with other weights: what it has in the end is from the checkpoint.
    torch.manual_seed(1 if resumes else 0)
    hidden = 16 * arguments.heads
    llama = LlamaForCausalLM(
        LlamaConfig(hidden_size=hidden,
                    intermediate_size=3 * hidden,
                    num_hidden_layers=arguments.layers,
                    num_attention_heads=arguments.heads,
                    num_key_value_heads=2,
                    vocab_size=arguments.vocabulary))
    config = {
        'train_micro_batch_size_per_gpu': BATCH,
        'zero_optimization': {
            'stage': 1
        },
        'zero_allow_untested_optimizer': True,
        'tensor_parallel': {
            'autotp_size': degree
        },
        'checkpoint': {
            'load_universal': resumes
        }
    }
    optimizer = torch.optim.AdamW(llama.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=llama, optimizer=optimizer, config=config)
    return engine


def take_step(engine, step, vocabulary):
    """The loss before the step. All ranks see the same sequences."""
    tokens = torch.randint(vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


if __name__ == '__main__':
    main()
