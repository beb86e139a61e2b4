# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which process owns which location."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Tuple

import numpy as np

from deepspeed.checkpoint.affine.checks import listed, shown
from deepspeed.checkpoint.affine.views import ReadOnlyMapping
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError
from deepspeed.checkpoint.affine_transfer.parsing import LARGEST_ID, SMALLEST_ID


@dataclass(frozen=True)
class TransferEndpoints:
    """Where the locations of a source and of a target map live.

    A location is one buffer; a process may own several. Source and target location ids are two
    namespaces: source location 3 and target location 3 need not be related.

    Args:
        source: location id -> process, for every location of the source map.
        target: location id -> process, for every location of the target map.

    Processes are ranks within the group that the transfer runs in. Both mappings are copied.

    Raises:
        AffineTransferError: an id or a process is not an integer or beyond int64, or a process is negative.

    Example::

        endpoints = TransferEndpoints(source={0: 0, 1: 1}, target={0: 2, 1: 3})
        endpoints.source_process(1)  # 1
    """
    source: Mapping
    target: Mapping

    def __post_init__(self):
        object.__setattr__(self, 'source', _checked(self.source, 'source'))
        object.__setattr__(self, 'target', _checked(self.target, 'target'))

    def source_process(self, location: int) -> int:
        """The process that owns this source location; AffineTransferError when none is named."""
        return _process(self.source, location, 'source')

    def target_process(self, location: int) -> int:
        """The process that owns this target location; AffineTransferError when none is named."""
        return _process(self.target, location, 'target')

    def source_processes(self, locations: np.ndarray) -> np.ndarray:
        """``source_process`` of many locations, int64[n], asking once per distinct one."""
        return _processes(self.source, locations, 'source')

    def target_processes(self, locations: np.ndarray) -> np.ndarray:
        """``target_process`` of many locations, int64[n], asking once per distinct one."""
        return _processes(self.target, locations, 'target')

    def source_locations(self, process: int) -> Tuple[int, ...]:
        """The source locations of one process, ascending."""
        return tuple(sorted(location for location, owner in self.source.items() if owner == process))

    def target_locations(self, process: int) -> Tuple[int, ...]:
        """The target locations of one process, ascending."""
        return tuple(sorted(location for location, owner in self.target.items() if owner == process))


def _checked(mapping: Mapping, side: str) -> ReadOnlyMapping:
    if not isinstance(mapping, Mapping):
        raise AffineTransferError(f'{side} endpoints are a {type(mapping).__name__}; expected a mapping of '
                                  'location id to process')
    entries = {}
    for location, process in mapping.items():
        entry = f'{side} endpoints entry {shown(location)}: {shown(process)}'
        if isinstance(location, bool) or isinstance(process, bool):
            raise AffineTransferError(f'{entry}: a bool is neither a location nor a process')
        try:
            key, owner = operator.index(location), operator.index(process)
        except TypeError:
            raise AffineTransferError(f'{entry}: location and process must be integers') from None
        if not SMALLEST_ID <= key <= LARGEST_ID:
            raise AffineTransferError(f'{entry}: the location does not fit int64')
        if not 0 <= owner <= LARGEST_ID:
            raise AffineTransferError(f'{entry}: a process is a rank within the transfer group, from 0 up')
        entries[key] = owner
    return ReadOnlyMapping(entries)


def _process(mapping: Mapping, location: int, side: str) -> int:
    try:
        return mapping[location]
    except KeyError:
        raise AffineTransferError(
            f'{side} location {location} has no process: the {side} endpoints name {listed(sorted(mapping))}. '
            f'Give TransferEndpoints an entry for every location of the {side} map') from None


def _processes(mapping: Mapping, locations: np.ndarray, side: str) -> np.ndarray:
    distinct, where = np.unique(locations, return_inverse=True)
    owners = np.array([_process(mapping, location, side) for location in distinct.tolist()], dtype=np.int64)
    return owners[where.reshape(-1)]
