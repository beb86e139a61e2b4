# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a transfer did, in numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Tuple


@dataclass(frozen=True)
class TransferStats:
    """What one process did in a transfer. ``str()`` of it is a short report.

    Attributes:
        segments: segments that it sent, received or copied locally.
        chunks: messages that it sent and received.
        rounds: rounds of the process that has most.
        local_copy_bytes: bytes written by local copies.
        sent_bytes, received_bytes: bytes of parameters on the wire.
        in_place_bytes: bytes of regions that were already where they belong, and were not touched.
        peak_staging_bytes: most memory that it staged at one time.
        packed_bytes: bytes that went through staging memory, on their way out or in.
        forwarded_bytes: those of ``sent_bytes`` that it had itself received, and passed on to other receivers.
        overhead_bytes: what else it sent: agreement and checksums.
        shadow_bytes: the second copy of its targets, with ``staged``; no part of the staging memory.
        busiest_sender, busiest_receiver: the process that sent or received most, and how many bytes.
        seconds: phase -> seconds in which this process did nothing else: ``agree``, ``pack``, ``post``, ``local``,
            ``wait``, ``unpack``, ``verify``, ``switch``. On accelerators copies are only launched in theirs.
    """
    segments: int
    chunks: int
    rounds: int
    local_copy_bytes: int
    sent_bytes: int
    received_bytes: int
    in_place_bytes: int
    peak_staging_bytes: int
    packed_bytes: int = 0
    forwarded_bytes: int = 0
    overhead_bytes: int = 0
    shadow_bytes: int = 0
    busiest_sender: Tuple[int, int] = (0, 0)
    busiest_receiver: Tuple[int, int] = (0, 0)
    seconds: Mapping = field(default_factory=dict)

    @property
    def wire_efficiency(self) -> float:
        """Bytes of parameters over all bytes that this process sent; 1.0 where it sent none."""
        return self.sent_bytes / (self.sent_bytes + self.overhead_bytes) if self.sent_bytes else 1.0

    def __str__(self) -> str:
        total = sum(self.seconds.values())
        phases = ', '.join(f'{phase} {took:.3f}' for phase, took in self.seconds.items() if took >= 0.0005)
        lines = [
            f'{self.segments} segments in {total:.3f} s' + (f' ({phases})' if phases else ''),
            f'sent {_size(self.sent_bytes)} ({_size(self.forwarded_bytes)} of it passed on for others), received '
            f'{_size(self.received_bytes)}, in {self.chunks} messages and {self.rounds} rounds',
            f'copied locally {_size(self.local_copy_bytes)}, already in place {_size(self.in_place_bytes)}',
            f'packed {_size(self.packed_bytes)} through {_size(self.peak_staging_bytes)} of staging memory; wire '
            f'efficiency {self.wire_efficiency:.4f}',
            f'busiest sender: process {self.busiest_sender[0]} with {_size(self.busiest_sender[1])}; busiest '
            f'receiver: process {self.busiest_receiver[0]} with {_size(self.busiest_receiver[1])}',
        ]
        if self.shadow_bytes:
            lines.append(f'staged: a second copy of the targets takes {_size(self.shadow_bytes)}')
        return '\n'.join(lines)


def _size(numbytes: int) -> str:
    """Bytes in the largest unit of which there is at least one.

    >>> _size(3 << 19)
    '1.50 MiB'
    """
    value = float(numbytes)
    for unit in ('B', 'KiB', 'MiB', 'GiB'):
        if value < 1024:
            break
        value /= 1024
    else:
        unit = 'TiB'
    return f'{numbytes} B' if unit == 'B' else f'{value:.2f} {unit}'
