# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Have something happen in the middle of a transfer, at a moment that no clock decides."""

import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import Callable, Iterator, List
from unittest.mock import patch

from deepspeed.checkpoint.affine_transfer_executor.channel import Channel


@contextmanager
def acting(method: str, number: int, act: Callable[[], None], after: bool = False) -> Iterator[None]:
    """Call ``act`` once in this process, before or after call ``number``, from 0, of a method of its channels.

    Args:
        method: ``gather`` (an agreement), ``post`` (a round begins) or ``wait`` (for its operations).
    """
    real, calls = getattr(Channel, method), []

    def acted(self, *args):
        calls.append(method)
        now = len(calls) == number + 1
        if now and not after:
            act()
        result = real(self, *args)
        if now and after:
            act()
        return result

    with patch.object(Channel, method, acted):
        yield


def die() -> None:
    """Have this process killed, as by an operator or for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def counted_operations() -> Iterator[List[int]]:
    """A list that gets, for each round that this process posts inside, how many sends and receives it has."""
    real, counts = Channel.post, []

    def post(self, receives, sends):
        counts.append(len(receives) + len(sends))
        return real(self, receives, sends)

    with patch.object(Channel, 'post', post):
        yield counts


class Forgotten:
    """The handle of an operation that never ends, as gloo makes one now and then when a connection breaks."""

    def wait(self, timeout):
        time.sleep(timeout.total_seconds())
        raise RuntimeError('timed out')


@contextmanager
def forgotten_operations() -> Iterator[None]:
    """Have this process never hear of the rounds that it posts inside."""
    real = Channel.post

    def post(self, receives, sends):
        return [replace(pending, work=Forgotten()) for pending in real(self, receives, sends)]

    with patch.object(Channel, 'post', post):
        yield


@contextmanager
def altered_receive() -> Iterator[None]:
    """Have the first byte of the first message that this process receives inside altered on its way."""
    real_post, real_wait = Channel.post, Channel.wait
    expected = []

    def post(self, receives, sends):
        pending = real_post(self, receives, sends)
        if receives and not expected:
            expected.append((pending[0], receives[0][1]))
        return pending

    def wait(self, operations, deadline):
        real_wait(self, operations, deadline)
        if expected and expected[0][0] in operations:
            expected[0][1][0] ^= 1

    with patch.object(Channel, 'post', post), patch.object(Channel, 'wait', wait):
        yield
