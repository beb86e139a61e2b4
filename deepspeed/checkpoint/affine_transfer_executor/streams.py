# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Work beside an accelerator's current stream."""

from contextlib import contextmanager
from typing import Any, Iterator, Optional

import torch


def side_stream(device: torch.device) -> Optional[Any]:
    """A stream of its own on this device, or None on the CPU, which has no streams."""
    return None if device.type == 'cpu' else getattr(torch, device.type).Stream(device)


@contextmanager
def beside(stream: Optional[Any]) -> Iterator[None]:
    """Do what is inside on ``stream``, after what the current stream was given before, and have the current stream
    wait for it: events order the two, and nothing waits for the whole device. With None it is simply done.

    Memory that is used on the stream must be allocated on it too, so that it is not handed out while it is in use.
    """
    if stream is None:
        yield
        return
    kind = getattr(torch, stream.device.type)
    current = kind.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with kind.stream(stream):
            yield
    finally:
        current.wait_stream(stream)
