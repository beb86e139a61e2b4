# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What DeepSpeed's converter wrote."""

import torch

from affine_universal_processes import STATES


def converted(folder, parameter, key):
    """One state of one parameter of a universal checkpoint, whole."""
    return torch.load(folder / "zero" / parameter / f"{key}.pt", weights_only=False)["param"]


def assert_same_files(ours, theirs):
    """Both universal checkpoints hold the same parameters and states, bit for bit, and say the same of them."""
    ours, theirs = ours / "zero", theirs / "zero"
    files = sorted(path.relative_to(ours) for path in ours.rglob("*.pt") if path.parent != ours)
    assert files == sorted(path.relative_to(theirs) for path in theirs.rglob("*.pt") if path.parent != theirs)
    assert len(files) > 3 * len(STATES)
    for file in files:
        found, expected = (_content(side / file) for side in (ours, theirs))
        assert found.keys() == expected.keys() and torch.equal(found["param"], expected["param"]), file


def _content(file):
    content = torch.load(file, weights_only=False)
    # A counter, and a parameter of ZeRO-3 without tensor parallelism, is written without anything around it.
    return content if isinstance(content, dict) else {"param": torch.as_tensor(content)}
