# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks of real DeepSpeed jobs, forked from one process that has imported DeepSpeed already.

Importing DeepSpeed with the models that these tests train takes longer than training them. A host does it once, and
every rank of every job starts as a fork of it. A host can also hide our packages, so that its ranks run the modules
that DeepSpeed itself ships.

Example::

    def work(rank, world_size, factor):
        return factor * torch.distributed.get_world_size()

    with RankHost() as host:
        assert host.run(2, work, 10) == [20, 20]
"""

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import traceback

import torch.distributed as dist

ANSWER_SECONDS = 200
GRACE_SECONDS = 5
# The last ones are imported only while an engine is made, and they are slow.
PRELOADED = ("deepspeed", "deepspeed.checkpoint.ds_to_universal", "deepspeed.module_inject.auto_tp",
             "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.zero.muon.muon_optimizer",
             "transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral")
OURS = ("affine", "affine_geometry", "affine_transfer", "affine_transfer_executor", "affine_adapters")


class RankHost:
    """A process that runs jobs, one after the other.

    Args:
        hide_our_packages: whether ``deepspeed.checkpoint.affine`` is DeepSpeed's own module in its ranks.
    """

    def __init__(self, hide_our_packages=False):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon: it has children itself. It ends when its connection does.
        self._process = context.Process(target=_serve, args=(theirs, hide_our_packages))
        self._process.start()
        theirs.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._connection.close()
        self._process.join(20)
        self._process.kill()

    def run(self, world_size, function, *arguments):
        """The results of ``function(rank, world_size, *arguments)`` by rank; a rank that failed, died or is late is an
        AssertionError.

        The function is one of a module, and what it returns is pickled.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connection.send((world_size, store.port, function, arguments))
        assert self._connection.poll(ANSWER_SECONDS + 60), "the host of the ranks has not answered"
        answers = self._connection.recv()
        failures = [
            f"rank {rank} {outcome}: {text}" for rank, (outcome, text) in enumerate(answers) if outcome != "done"
        ]
        assert not failures, "\n".join(failures)
        return [pickle.loads(content) for _, content in answers]


def _serve(connection, hide_our_packages):
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    if hide_our_packages:
        sys.meta_path.insert(0, _DeepSpeedsOwnModules())
    for name in PRELOADED:
        importlib.import_module(name)
    import deepspeed
    # Without this the first collective compiles an extension.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    while True:
        try:
            job = connection.recv()
        except EOFError:
            # Without the shutdown of an interpreter that has imported all of this.
            os._exit(0)
        connection.send(_run_job(*job))


def _run_job(world_size, port, function, arguments):
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        context.Process(target=_work, args=(rank, world_size, port, pipes[rank][1], function, arguments))
        for rank in range(world_size)
    ]
    try:
        for process, (_, sending) in zip(ranks, pipes):
            process.start()
            sending.close()
        return _answers([receiving for receiving, _ in pipes])
    finally:
        for process in ranks:
            process.join(5)
            process.kill()


def _answers(pipes):
    """What each rank said. After one failed the others may wait for it, so they get a few seconds only."""
    answers = {}
    seconds = ANSWER_SECONDS
    while len(answers) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in answers]
        ready = multiprocessing.connection.wait(waiting, seconds)
        for pipe in ready or waiting:
            answers[pipe] = _answer(pipe) if ready else ("late", "")
            seconds = GRACE_SECONDS if answers[pipe][0] != "done" else seconds
    return [answers[pipe] for pipe in pipes]


def _answer(pipe):
    try:
        return pipe.recv()
    except EOFError:
        return "died", ""


def _work(rank, world_size, port, sending, function, arguments):
    os.environ.update(RANK=str(rank),
                      LOCAL_RANK=str(rank),
                      WORLD_SIZE=str(world_size),
                      MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    code = 1
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        # As bytes: tensors would otherwise be sent as shared memory of a process that is about to end.
        content = pickle.dumps(function(rank, world_size, *arguments))
        dist.barrier()
        sending.send(("done", content))
        code = 0
    except BaseException:
        sending.send(("failed", traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not through interpreter shutdown: threads of DeepSpeed's may abort a process whose work is done.
        os._exit(code)


class _DeepSpeedsOwnModules(importlib.abc.MetaPathFinder):
    """Leads our import names to the files that DeepSpeed itself ships, as where our packages are not installed."""

    def find_spec(self, name, path=None, target=None):
        parent, _, last = name.rpartition(".")
        if parent != "deepspeed.checkpoint" or last not in OURS:
            return None
        file = importlib.metadata.distribution("deepspeed").locate_file(f"deepspeed/checkpoint/{last}.py")
        if not os.path.exists(file):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.util.spec_from_file_location(name, file)
