# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One process of the demo, trainer or rollout, from its start to its last message.

Only the standard library is imported at the top: the environment must be set before torch and DeepSpeed load.
"""

import os
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class Assignment:
    """role: "trainer" or "rollout". rank: within the world of that role. use_deepspeed: trainers are real engines.

    store_port: the launcher's store on this machine. folder: where trainers leave the reference. log: file that takes
    everything the process prints. timeout: seconds for any one wait.
    """
    role: str
    rank: int
    use_deepspeed: bool
    store_port: int
    folder: str
    log: str
    timeout: float

    @property
    def label(self):
        return f"{self.role} {self.rank}"


def run(assignment, connection):
    """Do the work, send ("done", lines) or ("failed", traceback), and end this process. Does not return."""
    _redirect_output(assignment.log)
    os.environ.update(_environment(assignment))
    code = 1
    try:
        lines = _work(assignment)
        connection.send(("done", lines))
        code = 0
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
    finally:
        _end_process(code)


def _redirect_output(path):
    """Also what C++ libraries print."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _environment(assignment):
    """DeepSpeed insists on the variables of a launcher, although the process group exists by then."""
    return {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "RANK": str(assignment.rank),
        "LOCAL_RANK": str(assignment.rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(assignment.store_port),
    }


def _work(assignment):
    import torch
    import torch.distributed as dist
    from ds_affine.demo import rollout, trainer
    torch.set_num_threads(1)
    wait = timedelta(seconds=assignment.timeout)
    store = dist.TCPStore("127.0.0.1", assignment.store_port, is_master=False, timeout=wait)
    world = dist.PrefixStore(assignment.role, store)
    dist.init_process_group("gloo", store=world, rank=assignment.rank, world_size=2, timeout=wait)
    work = {"trainer": trainer.work, "rollout": rollout.work}[assignment.role]
    lines = work(assignment, store)
    dist.barrier()
    return lines


def _end_process(code):
    """A ZeRO-3 process on CPU can abort while Python shuts down; all results are out, so it is not left to that."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
