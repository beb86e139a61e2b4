# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The example of the README does what it says when it is pasted and run."""

import pathlib
import re
import subprocess
import sys

README = pathlib.Path(__file__).resolve().parents[3] / "README.md"


def python_blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_example_runs_as_pasted(tmp_path):
    blocks = python_blocks()
    assert len(blocks) == 1
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 15
    done = subprocess.run([sys.executable, "-c", blocks[0]], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+ copies, 30 elements$", done.stdout, flags=re.MULTILINE)
