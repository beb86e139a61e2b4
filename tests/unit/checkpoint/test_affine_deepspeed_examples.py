# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The examples that need DeepSpeed, run as their users run them."""

import os
import pathlib
import re
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / 'examples'
TORCHRUN = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node']
TIMEOUT = 500
TO_END = 30
ROUND = re.compile(r'^ *(\d+) +\d\.\d+ +(\S+e[+-]\d+) *(\S+e[+-]\d+)?$', flags=re.MULTILINE)
RESUMED = re.compile(r'the losses of (\d+) more steps differ by (\S+) at most')


def run_example(name, folder, launcher=()):
    """What the example prints, stdout and stderr together; it must end well. ``launcher`` comes before it."""
    process = subprocess.Popen([sys.executable, *launcher, str(EXAMPLES / name)],
                               cwd=folder,
                               env=dict(os.environ, OMP_NUM_THREADS='1', DS_ACCELERATOR='cpu'),
                               stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT,
                               text=True)
    try:
        printed, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        # Asked to end, torchrun ends its workers too; killed, it would leave them behind.
        process.terminate()
        printed, _ = process.communicate(timeout=TO_END)
        raise AssertionError(f'{name} did not end in time:\n{printed}') from None
    assert process.returncode == 0, printed
    return printed


def test_rl_weight_sync(tmp_path):
    """The logits agree in every round, and would not without the sync."""
    printed = run_example('rl_weight_sync.py', tmp_path, [*TORCHRUN, '6'])
    rounds = ROUND.findall(printed)
    assert [int(number) for number, _, _ in rounds] == [0, 1, 2, 3, 4], printed
    assert all(float(apart) < 1e-5 for _, apart, _ in rounds), printed
    assert rounds[0][2] == '' and all(float(stale) > 1e-2 for _, _, stale in rounds[1:]), printed


def test_resume_other_tp(tmp_path):
    """Without tensor parallelism the losses go on where those with it were."""
    printed = run_example('resume_other_tp.py', tmp_path)
    closing = RESUMED.search(printed.splitlines()[-1])
    assert closing is not None, printed
    assert int(closing[1]) == 3 and float(closing[2]) < 1e-4, printed
