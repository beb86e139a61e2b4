# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Work beside an accelerator's current stream."""

from contextlib import contextmanager
from typing import Iterator

import torch


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Do what is inside on a stream of its own, after what the current stream was given before, and have the current
    stream wait for it: events order the two, and nothing waits for the whole device. On the CPU there are no streams.
    """
    if device.type == 'cpu':
        yield
        return
    kind = getattr(torch, device.type)
    current, own = kind.current_stream(device), kind.Stream(device)
    own.wait_stream(current)
    try:
        with kind.stream(own):
            yield
    finally:
        current.wait_stream(own)
