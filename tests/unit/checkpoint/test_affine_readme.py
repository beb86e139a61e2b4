# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The examples of the README do what it says when they are pasted and run."""

import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).resolve().parents[3] / "README.md"
IN_ONE_PROCESS, BETWEEN_PROCESSES, COMPILED = range(3)
# Lines that a pasted example prints (DeepSpeed may log others), and how many lines of code it may have.
PRINTED = {
    IN_ONE_PROCESS: [r"\d+ copies, 30 elements"],
    COMPILED: [r"8 segments in \d+\.\d+ s", r"copied locally 24\.00 KiB"],
    BETWEEN_PROCESSES: [r"rank 2 received shard 0", r"rank 3 received shard 1"],
}
LONGEST = {IN_ONE_PROCESS: 15, BETWEEN_PROCESSES: 25, COMPILED: 20}


def python_blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_every_example_is_run_below():
    assert len(python_blocks()) == len(PRINTED) == len(LONGEST)


@pytest.mark.parametrize("number", PRINTED)
def test_example_runs_as_pasted(tmp_path, number):
    block = python_blocks()[number]
    assert len([line for line in block.splitlines() if line.strip()]) <= LONGEST[number]
    example = tmp_path / "example.py"
    example.write_text(block, encoding="utf-8")
    done = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for pattern in PRINTED[number]:
        # Processes write to one pipe, where the text of one line and the end of another may come in any order.
        assert re.search(pattern, done.stdout), done.stdout
