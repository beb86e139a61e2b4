# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Processes that are to make a group find one another in a store, or hear why they cannot."""

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

from deepspeed.checkpoint.affine.checks import listed
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError, described
from deepspeed.checkpoint.affine_transfer_executor.patience import within

COMPLETE = 'complete'
# Seconds to find out who has not come, after the time is over.
TO_ACCOUNT = 1.0


def meet(store, rank: int, size: int, deadline: float, timeout: float) -> None:
    """Wait until all have come, and say who has not: the backend itself would only say that it failed.

    Args:
        store: a torch.distributed Store that serves this one meeting.
        rank: this process; size: how many are to come.
        deadline: of ``time.monotonic()``; timeout: how many seconds that was, for messages.

    Raises:
        AffineTransferExecutionError: on all that have come or will: two came as one process, or for groups of
            different sizes. On those that came: some did not come in time, or the store failed.
    """
    try:
        objection = within(deadline - time.monotonic(), lambda: _come(store, rank, size, deadline))
        # The store ends the wait itself, unless it is silent.
        verdict = objection or within(_left(deadline) + TO_ACCOUNT, lambda: _waited(store, 'all', deadline))
    except Exception as error:
        # Clocks of stores are coarser than ours.
        late = _left(deadline) <= 0.01 * timeout
        how = _missing(store, size, timeout) if late else 'lost the store of the transfer group'
        raise AffineTransferExecutionError(f'process {rank} {how}: {described(error)}') from error
    if verdict != COMPLETE:
        _let_others_hear(store, rank)
        raise AffineTransferExecutionError(f'process {rank} could not join the transfer group: {verdict}')


def _come(store, rank: int, size: int, deadline: float) -> str:
    """Note that this process is here, and conclude the meeting if it is the last one.

    Returns:
        Why this process does not fit, which concludes the meeting too, or nothing.
    """
    me = f'process {rank} of {size} (pid {os.getpid()} on {socket.gethostname()})'
    store.add('came', 1)
    if store.add(f'joined/{rank}', 1) != 1:
        other = _text(store, f'who/{rank}') if store.check([f'who/{rank}']) else 'one that left no name'
        return _conclude(
            store, f'another process has joined this transfer group as process {rank}, or the name was used before: '
            f'{me} came after {other}. Give every process a rank of its own, and every group of a store a name of its '
            'own')
    store.set(f'who/{rank}', me)
    arrived = store.add('joined', 1)
    if arrived == 1:
        store.set('first', f'{size} {me}')
    expected, first = _waited(store, 'first', deadline).split(' ', 1)
    if expected != str(size):
        return _conclude(
            store, f'{me} and {first} came to one transfer group of different sizes. Give all the same size, or their '
            'groups different names')
    if arrived == size:
        _conclude(store, COMPLETE)
    return ''


def _conclude(store, verdict: str) -> str:
    """Tell all who wait and all who will come, unless the meeting is concluded already."""
    if store.add('concluded', 1) == 1:
        store.set('all', verdict)
    return verdict


def _let_others_hear(store, rank: int) -> None:
    """Process 0, which may be the store's server, leaves last: the others are still to read why they must leave."""

    def leave() -> None:
        end = time.monotonic() + TO_ACCOUNT
        store.add('heard', 1)
        while rank == 0 and store.add('heard', 0) < store.add('came', 0) and time.monotonic() < end:
            time.sleep(0.01)

    with suppress(Exception):
        within(TO_ACCOUNT, leave)


def _waited(store, key: str, deadline: float) -> str:
    """A note, as soon as somebody has left it."""
    store.wait([key], timedelta(seconds=_left(deadline)))
    return _text(store, key)


def _text(store, key: str) -> str:
    return store.get(key).decode(errors='replace')


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _missing(store, size: int, timeout: float) -> str:
    try:
        missing = within(TO_ACCOUNT, lambda: [peer for peer in range(size) if store.add(f'joined/{peer}', 0) == 0])
    except Exception:
        # A silent store, or too many to ask for each.
        missing = []
    whom = f'processes {listed(missing)}' if missing else 'others'
    return f'waited {timeout:g} seconds for {whom} to join the transfer group of {size}, in vain'
