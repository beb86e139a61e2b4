# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A process group for transfers only, beside whatever groups its processes have."""

import time
from datetime import timedelta
from typing import Any, Union

import torch
import torch.distributed as dist

from deepspeed.checkpoint.affine.checks import shown
from deepspeed.checkpoint.affine_transfer_executor.channel import DEVICES
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError, described
from deepspeed.checkpoint.affine_transfer_executor.meeting import meet
from deepspeed.checkpoint.affine_transfer_executor.notices import NoticeBoard
from deepspeed.checkpoint.affine_transfer_executor.patience import LONGEST, checked_timeout, within

# Processes that have all come connect within a moment, even where the last came at the very end.
TO_CONNECT = 1.0
MOST_PROCESSES = 2**31 - 1


class TransferGroup:
    """A group made by ``join_transfer_group``; give it to ``execute_transfer`` as ``group``.

    It is no default group and takes none away: trainer and server keep their own worlds. Close it when the
    transfers are over, or use it in a ``with`` statement.
    """

    def __init__(self, backend, board: NoticeBoard):
        self._backend = backend
        self._size = backend.size()
        self._rank = backend.rank()
        # The store's server, if it runs here, lives as long as something refers to it.
        self._board = board

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
    def board(self) -> NoticeBoard:
        """The group's notes about failures; after ``close`` there are none."""
        return self._board

    def close(self) -> None:
        """Drop the connections, and the store if it is served here, also where programs of the group live on. Closing
        twice is harmless."""
        self._backend, self._board = None, NoticeBoard(None, self._rank)

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
        timeout: seconds to wait for the others, at most a million.
        name: tells groups apart that meet in one store. One name serves one group: give another to join
            again through a store that still runs.

    Returns:
        The group, a handle of this process alone.

    Raises:
        AffineTransferExecutionError: a bad argument, a rank that another process took, processes that were given
            different sizes, or processes that did not come in time, by their numbers.

    Example::

        with join_transfer_group('10.0.0.1:29511', rank, 4) as group:
            execute_transfer(plan, sources, targets, endpoints, torch.bfloat16, group=group)
    """
    _check_arguments(rank, size, backend, name)
    timeout = checked_timeout(timeout)
    deadline = time.monotonic() + timeout
    store = address if isinstance(address, dist.Store) else _tcp_store(address, rank, timeout)
    own = dist.PrefixStore(name, store)
    meet(own, rank, size, deadline, timeout)
    left = timedelta(seconds=max(deadline - time.monotonic(), TO_CONNECT))
    try:
        made = _backend(backend, dist.PrefixStore('connect', own), rank, size, left)
    except Exception as error:
        raise AffineTransferExecutionError(f'process {rank} could not connect to the {size} processes of transfer '
                                           f'group {name!r}: {described(error)}') from error
    return TransferGroup(made, NoticeBoard(dist.PrefixStore('notices', own), rank))


def _check_arguments(rank: int, size: int, backend: str, name: str) -> None:
    if type(rank) is not int or type(size) is not int or not 0 <= rank < size <= MOST_PROCESSES:
        raise AffineTransferExecutionError(f'rank {shown(rank)} of {shown(size)}; expected integers with '
                                           '0 <= rank < size')
    if backend not in ('gloo', 'nccl'):
        raise AffineTransferExecutionError(f'backend {shown(backend)} is not known; expected "gloo" or "nccl"')
    if not isinstance(name, str) or not name.isprintable():
        raise AffineTransferExecutionError(f'name is {shown(name)}; expected a string of printable characters')


def _backend(kind: str, store, rank: int, size: int, timeout: timedelta):
    if kind == 'gloo':
        # It ends the wait for its peers itself, but not one for a silent store.
        limit = timeout.total_seconds() + TO_CONNECT
        return within(limit, lambda: dist.ProcessGroupGloo(store, rank, size, timeout))
    options = dist.ProcessGroupNCCL.Options()
    # Waits end by the timeouts of transfers. NCCL's own watchdog would end the process instead.
    options._timeout = timedelta(seconds=LONGEST)
    made = dist.ProcessGroupNCCL(store, rank, size, options)
    device = torch.device(DEVICES[kind], torch.cuda.current_device())
    within(timeout.total_seconds(), lambda: _first_exchange(made, device, size))
    return made


def _first_exchange(backend, device: torch.device, size: int) -> None:
    """NCCL connects in the first exchange, and would wait there for ever."""
    torch.cuda.set_device(device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    backend.allgather([[torch.empty_like(row) for _ in range(size)]], [row]).wait()
    torch.cuda.synchronize(device)


def _tcp_store(address: str, rank: int, timeout: float):
    """The store at this address; process 0 is its server."""
    if not isinstance(address, str):
        raise AffineTransferExecutionError(f'address is a {type(address).__name__}; expected "host:port" or a Store')
    host, _, port = address.removeprefix('tcp://').rpartition(':')
    # Other digits than ASCII ones are digits too, but no port.
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise AffineTransferExecutionError(f'address {shown(address)} is not "host:port" with a port from 1 to 65535')
    limit = timedelta(seconds=timeout)
    began = time.monotonic()
    try:
        # torch itself would wait for ever where something listens and does not answer.
        return within(
            timeout,
            lambda: dist.TCPStore(host.strip('[]'), int(port), None, rank == 0, limit, wait_for_workers=False))
    except Exception as error:
        waited = time.monotonic() - began
        doing = f'waited {waited:.1f} seconds for process 0, in vain,' if rank else 'could not listen'
        raise AffineTransferExecutionError(f'process {rank} {doing} at {address!r}: {described(error)}') from error
