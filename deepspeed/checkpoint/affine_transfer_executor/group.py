# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A process group for transfers only, beside whatever groups its processes have."""

import time
from datetime import timedelta
from typing import Any, List, Union

import torch
import torch.distributed as dist

from deepspeed.checkpoint.affine_transfer_executor.channel import DEVICES
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError


class TransferGroup:
    """A group made by ``join_transfer_group``; give it to ``execute_transfer`` as ``group``.

    It is no default group and takes none away: trainer and server keep their own worlds. Close it when the
    transfers are over, or use it in a ``with`` statement.
    """

    def __init__(self, backend, store, notice_store):
        self._backend = backend
        self._size = backend.size()
        self._rank = backend.rank()
        # The store's server, if it runs here, lives as long as this reference.
        self._store = store
        self._notice_store = notice_store

    def rank(self) -> int:
        """This process in the group."""
        return self._rank

    def size(self) -> int:
        """Processes in the group."""
        return self._size

    @property
    def backend(self):
        """torch's backend; AffineTransferExecutionError after ``close``."""
        if self._backend is None:
            raise AffineTransferExecutionError('this transfer group is closed; join a new one')
        return self._backend

    @property
    def notice_store(self):
        """Where the group's processes leave notes about failures."""
        return self._notice_store

    def close(self) -> None:
        """Drop the connections. Closing twice is harmless."""
        self._backend = self._store = self._notice_store = None

    def __enter__(self) -> 'TransferGroup':
        return self

    def __exit__(self, *_) -> None:
        self.close()


def join_transfer_group(address: Union[str, Any],
                        rank: int,
                        size: int,
                        *,
                        backend: str = 'gloo',
                        timeout: float = 300.0,
                        name: str = 'affine_transfer') -> TransferGroup:
    """Join a group of processes which may belong to different jobs, with or without a default group.

    Args:
        address: ``'host:port'`` or ``'tcp://host:port'``, where process 0 will listen; or a
            torch.distributed Store that all of them can reach.
        rank: this process in the new group, from 0 up.
        size: processes in the new group.
        backend: ``'gloo'`` for CPU memory (accelerator memory is staged through it), ``'nccl'`` for GPUs.
        timeout: seconds to wait for the others.
        name: tells groups apart that meet in one store. One name serves one group: give another to join
            again through a store that still runs.

    Returns:
        The group, a handle of this process alone.

    Raises:
        AffineTransferExecutionError: a bad argument, a rank that another process took, or processes that did
            not come in time, by their numbers.

    Example::

        with join_transfer_group('10.0.0.1:29511', rank, 4) as group:
            execute_transfer(plan, sources, targets, endpoints, torch.bfloat16, group=group)
    """
    if type(rank) is not int or type(size) is not int or not 0 <= rank < size:
        raise AffineTransferExecutionError(f'rank {rank!r} of {size!r}; expected integers with 0 <= rank < size')
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise AffineTransferExecutionError(f'timeout is {timeout!r}; expected a positive number of seconds')
    if backend not in ('gloo', 'nccl'):
        raise AffineTransferExecutionError(f'backend {backend!r} is not known; expected "gloo" or "nccl"')
    deadline = time.monotonic() + timeout
    store = address if isinstance(address, dist.Store) else _tcp_store(address, rank, timeout)
    own = dist.PrefixStore(name, store)
    _meet(own, rank, size, timeout)
    left = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
    try:
        made = _backend(backend, dist.PrefixStore('connect', own), rank, size, left)
    except RuntimeError as error:
        raise AffineTransferExecutionError(f'process {rank} could not connect to the {size} processes of transfer '
                                           f'group {name!r}: {error}') from error
    return TransferGroup(made, store, dist.PrefixStore('notices', own))


def _backend(kind: str, store, rank: int, size: int, timeout: timedelta):
    if kind == 'gloo':
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    torch.empty(1, device=DEVICES[kind])  # NCCL needs the device to be initialised.
    return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())


def _tcp_store(address: str, rank: int, timeout: float):
    """The store at this address; process 0 is its server."""
    if not isinstance(address, str):
        raise AffineTransferExecutionError(f'address is a {type(address).__name__}; expected "host:port" or a Store')
    host, _, port = address.removeprefix('tcp://').rpartition(':')
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise AffineTransferExecutionError(f'address {address!r} is not "host:port" with a port from 1 to 65535')
    try:
        return dist.TCPStore(host.strip('[]'),
                             int(port),
                             None,
                             rank == 0,
                             timedelta(seconds=timeout),
                             wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        doing = 'could not listen' if rank == 0 else f'waited {timeout:g} seconds for process 0, in vain,'
        raise AffineTransferExecutionError(f'process {rank} {doing} at {address}: {error}') from error


def _meet(store, rank: int, size: int, timeout: float) -> None:
    """Wait until all have come, and say who has not: the backend itself would only say that it failed."""
    if store.add(f'joined/{rank}', 1) != 1:
        raise AffineTransferExecutionError(f'another process has joined this transfer group as process {rank}, or '
                                           'the name was used before; give every group of a store its own name')
    if store.add('joined', 1) == size:
        store.set('all', '1')
    try:
        store.wait(['all'], timedelta(seconds=timeout))
    except RuntimeError as error:
        missing: List[int] = [peer for peer in range(size) if store.add(f'joined/{peer}', 0) == 0]
        raise AffineTransferExecutionError(
            f'process {rank} waited {timeout:g} seconds for processes {missing} to join '
            f'the transfer group of {size}, in vain') from error
