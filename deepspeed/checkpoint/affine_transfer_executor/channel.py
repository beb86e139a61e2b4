# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Raw bytes between the processes of a group, over any kind of group that torch has."""

import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Iterator, List, Sequence, Tuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.distributed_c10d import AllgatherOptions, PrefixStore, _get_process_group_store

from deepspeed.checkpoint.affine_transfer_executor.errors import (AffineTransferExecutionError, TransferBrokenError,
                                                                  described, forget_locals)
from deepspeed.checkpoint.affine_transfer_executor.notices import NoticeBoard
from deepspeed.checkpoint.affine_transfer_executor.patience import Helper

# Backends that move accelerator memory; every other one is handed CPU memory.
DEVICES = {'nccl': 'cuda', 'xccl': 'xpu', 'hccl': 'npu'}
# A group may carry messages of its owner, whose tags are small as a rule.
DATA_TAG = 0x0AFF1E00
# Nobody ever sends with this tag.
SILENT_TAG = 0x0AFF1E01

# Seconds between looks at the board.
WATCH_EVERY = 1.0


@dataclass(frozen=True)
class Pending:
    """A posted operation: what it does, as a message would say it, with whom, and torch's handle."""
    action: str
    peers: Tuple[int, ...]
    work: Any


class WaitFailed(Exception):
    """A posted operation that broke or came to nothing in time."""

    def __init__(self, pending: Pending, cause: str):
        super().__init__(cause)
        # Without torch's handle: it would keep connections and store alive as long as anybody keeps the error.
        self.pending = replace(pending, work=None)


@dataclass(frozen=True)
class CallersGroup:
    """A group that the caller made: a torch.distributed Backend, and the group's notes."""
    backend: Any
    board: NoticeBoard


@dataclass(frozen=True)
class Channel:
    """One group as seen from this process.

    Args:
        group: what has the ``backend``, whose ranks are the group's, and the ``board``, its notes: a TransferGroup,
            which forgets them when it is closed, or a CallersGroup.
        rank: this process; size: processes in the group.
        device: where messages must lie.
        pid: of the process that made it; the connections are not those of its forks.
    """
    group: Any
    rank: int
    size: int
    device: torch.device
    pid: int

    @property
    def backend(self) -> Any:
        """AffineTransferExecutionError where the group was closed."""
        return self.group.backend

    @property
    def board(self) -> NoticeBoard:
        """The group's notes."""
        return self.group.board

    @classmethod
    def of(cls, group) -> 'Channel':
        """The channel of a ProcessGroup, a Backend, a TransferGroup, or (None) the default group.

        Raises:
            AffineTransferExecutionError: there is no such group, this process is not in it, or it is no group.
        """
        if group is None:
            if not dist.is_initialized():
                raise AffineTransferExecutionError('no group was given and torch.distributed is not initialised; '
                                                   'give a group, see join_transfer_group, or use apply_plan')
            group = dist.group.WORLD
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise AffineTransferExecutionError('this process is not in the group that it was given')
        if isinstance(group, dist.ProcessGroup):
            backend = _backend_of(group)
            group = CallersGroup(backend, NoticeBoard(_store_of(group), backend.rank()))
        elif isinstance(group, Backend):
            group = CallersGroup(group, NoticeBoard(None, group.rank()))
        elif not isinstance(getattr(group, 'board', None), NoticeBoard):
            # Nothing to agree over: the others cannot hear of it.
            raise AffineTransferExecutionError(
                f'group is a {type(group).__name__}; expected a torch.distributed process '
                'group, one from join_transfer_group, or None for the default group')
        backend = group.backend
        return cls(group, backend.rank(), backend.size(), _message_device(backend), os.getpid())

    @cached_property
    def _helper(self) -> Helper:
        """Who waits inside torch, where one cannot be called away."""
        return Helper()

    def check_open(self) -> None:
        """Raise AffineTransferExecutionError if the group was closed, as its ``backend`` does."""
        _ = self.backend

    def check_process(self) -> None:
        """Raise AffineTransferExecutionError in a fork of the process; the others cannot hear of it."""
        if os.getpid() != self.pid:
            raise AffineTransferExecutionError(f'this process was forked from process {self.pid}, whose connections '
                                               'it cannot use. Join a group in each process after it was forked')

    def gather(self, row: torch.Tensor, timeout: float) -> List[torch.Tensor]:
        """Everybody's row, by process. All rows must have the same dtype and size.

        Raises:
            WaitFailed: not everybody came within ``timeout`` seconds, or a connection is broken.
        """
        row = row.to(self.device)
        # gloo's own thread writes to them, which torch 2.4 refuses for tensors that were made in inference mode.
        with torch.inference_mode(False):
            rows = [torch.empty_like(row) for _ in range(self.size)]
        options = AllgatherOptions()
        # gloo takes zero milliseconds to mean the group's own timeout.
        options.timeout = timedelta(seconds=max(timeout, 0.001))
        everyone = tuple(rank for rank in range(self.size) if rank != self.rank)
        pending = Pending('the agreement', everyone, None)
        try:
            pending = Pending(pending.action, everyone, self.backend.allgather([rows], [row], options))
        except RuntimeError as error:
            raise WaitFailed(pending, str(error)) from error
        # gloo ends the operation itself when its own timeout is over, so that needs a little longer here.
        patience = 1.5 * timeout + 1 if self.device.type == 'cpu' else timeout
        self.wait([pending], time.monotonic() + patience)
        return [item.cpu() for item in rows]

    def post(self, receives: Sequence[Tuple[int, torch.Tensor]],
             sends: Sequence[Tuple[int, torch.Tensor]]) -> List[Pending]:
        """Start all receives and sends of a round; none of them waits for another.

        Raises:
            WaitFailed: a connection is already broken.
        """
        if self.device.type == 'cpu':
            calls = [('receive from', peer, self.backend.recv, tensor) for peer, tensor in receives]
            calls += [('send to', peer, self.backend.send, tensor) for peer, tensor in sends]
            return [self._start(*call) for call in calls]
        return self._post_together(receives, sends)

    def _post_together(self, receives: Sequence[Tuple[int, torch.Tensor]],
                       sends: Sequence[Tuple[int, torch.Tensor]]) -> List[Pending]:
        """On accelerators the operations of a round must be one group, or they would wait for one another."""
        peers = tuple(sorted({peer for peer, _ in [*receives, *sends]}))
        pending = Pending('exchange with', peers, None)
        try:
            self.backend._start_coalescing()
            try:
                for peer, tensor in receives:
                    self.backend.recv([tensor], peer, DATA_TAG)
                for peer, tensor in sends:
                    self.backend.send([tensor], peer, DATA_TAG)
            finally:
                work = self.backend._end_coalescing()
        except RuntimeError as error:
            raise WaitFailed(pending, str(error)) from error
        return [Pending(pending.action, peers, work)] if peers else []

    def wait(self, operations: Sequence[Pending], deadline: float) -> None:
        """Wait for operations until ``deadline`` (of ``time.monotonic()``), or until the group breaks elsewhere.

        Raises:
            WaitFailed: one broke, or did not end in time.
        """
        if self.device.type != 'cpu':
            for pending in operations:
                try:
                    self._poll(pending, deadline)
                except RuntimeError as error:
                    raise WaitFailed(pending, str(error)) from error
            return
        waiting = list(operations)
        # A closure would outlive forget_locals: frames keep their functions, and these their cells.
        question = self._helper.ask(partial(_wait_for_each, waiting, deadline))
        try:
            while not question.answered(WATCH_EVERY):
                if self.board.broken() is not None:
                    # gloo tells a process whose peer has hung up at once, but now and then it forgets an operation
                    # that was just under way (seen a few times in a thousand breaks).
                    self.hang_up()
                    if not question.answered(WATCH_EVERY):
                        raise WaitFailed(next(iter(waiting), operations[-1]), 'the group broke elsewhere')
        except KeyboardInterrupt:
            # A thread that is left behind may abort a process that ends meanwhile.
            self.hang_up()
            question.answered(WATCH_EVERY)
            raise
        question.answer()

    def _poll(self, pending: Pending, deadline: float) -> None:
        """On accelerators ``wait`` only orders streams and would never return an error, so the host looks itself."""
        began = looked = time.monotonic()
        while not pending.work.is_completed():
            now = time.monotonic()
            if now > deadline:
                raise WaitFailed(pending, f'nothing came in {now - began:.1f} seconds')
            if now - looked > WATCH_EVERY:
                looked = now
                if self.board.broken() is not None:
                    raise WaitFailed(pending, 'the group broke elsewhere')
            time.sleep(0.0002)
        # Work that failed is completed too.
        if pending.work.exception() is not None:
            raise RuntimeError(str(pending.work.exception()))
        pending.work.wait()

    def leave(self, what: str, report: str) -> TransferBrokenError:
        """End the group: note why on the board, hang up, and make the error to raise.

        Args:
            what: what broke, and what it means for the targets.
            report: how it broke on this process.
        """
        began = None
        try:
            began = self.board.broken()
            self.board.report(report)
        finally:
            self.hang_up()
        suffix = f'. It began elsewhere: {began}' if began else ''
        return TransferBrokenError(f'{what}: {report}{suffix}. This group cannot be used any more; join a new one')

    @contextmanager
    def ending(self, what: str) -> Iterator[None]:
        """End the group if anything is raised inside: the others wait for messages of this process, which must
        never meet those of a later transfer.

        Args:
            what: as ``leave`` takes it.

        Raises:
            TransferBrokenError: for any Exception; what interrupts the process is raised as it is.
        """
        try:
            yield
        except BaseException as error:
            broken = self.leave(what, f'process {self.rank} {described(error)}')
            forget_locals(error)
            if not isinstance(error, Exception):
                raise
            raise broken from error

    def hang_up(self) -> None:
        """Break the connections of this process, so that those who wait for it hear of it now.

        Best effort. gloo closes its connections when a receive times out, and only then.
        """
        if self.device.type != 'cpu':
            # A group that the caller owns is the caller's to end: there the others hear of it by their timeouts.
            if not isinstance(self.group, CallersGroup) and hasattr(self.backend, 'abort'):
                with suppress(RuntimeError):
                    self.backend.abort()
            return
        nothing = torch.empty(1, dtype=torch.uint8, device='cpu')
        # Where a peer is gone the receive fails at once, which closes no other connection: the next one is tried.
        for step in range(1, self.size):
            with suppress(RuntimeError):
                self.backend.recv([nothing], (self.rank + step) % self.size,
                                  SILENT_TAG).wait(timedelta(milliseconds=1))

    def _start(self, action: str, peer: int, call, tensor: torch.Tensor) -> Pending:
        try:
            return Pending(action, (peer, ), call([tensor], peer, DATA_TAG))
        except RuntimeError as error:
            raise WaitFailed(Pending(action, (peer, ), None), str(error)) from error


def _store_of(group):
    """A corner of the group's own store for notes, or None for a group that torch does not know."""
    try:
        return PrefixStore('affine_transfer', _get_process_group_store(group))
    except KeyError:
        return None


def _backend_of(group):
    """The group's backend for accelerator memory where it has one, else the one for CPU memory."""
    for device in group._device_types:
        backend = group._get_backend(device)
        if device.type != 'cpu' and DEVICES.get(backend.name()) == device.type:
            return backend
    return group._get_backend(torch.device('cpu'))


def _message_device(backend) -> torch.device:
    kind = DEVICES.get(backend.name(), 'cpu')
    if kind == 'cpu':
        return torch.device('cpu')
    return torch.device(kind, getattr(torch, kind).current_device())


def _wait_for_each(waiting: List[Pending], deadline: float) -> None:
    """Take operations off the list as they end."""
    while waiting:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            finished = waiting[0].work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise WaitFailed(waiting[0], str(error)) from error
        if finished is False:
            raise WaitFailed(waiting[0], f'nothing came in {left:.1f} seconds')
        del waiting[0]
