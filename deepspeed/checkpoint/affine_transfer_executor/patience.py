# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Waiting with an end."""

import threading
from typing import Any, Callable, List, Tuple

from deepspeed.checkpoint.affine.checks import shown
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError

# gloo counts milliseconds in 32 bits; twelve days are well within them.
LONGEST = 1e6


class Silent(Exception):
    """A question that nobody answered in time."""


def checked_timeout(value) -> float:
    """A timeout that a caller gave, in seconds.

    Raises:
        AffineTransferExecutionError: not a positive number, or more than ``LONGEST``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LONGEST:
        raise AffineTransferExecutionError(f'timeout is {shown(value)}; expected a positive number of seconds, at '
                                           f'most {LONGEST:.0f}')
    return float(value)


class Question:
    """Something that is asked in a thread of its own, which the asking thread need not wait for.

    A thread without an answer is left behind; it ends no later than the process.

    Args:
        ask: what to call.
    """

    def __init__(self, ask: Callable[[], Any]):
        self._answers: List[Tuple[Any, Any]] = []
        self._thread = threading.Thread(target=self._run, args=(ask, ), daemon=True)
        self._thread.start()

    def answered(self, seconds: float) -> bool:
        """Whether there is an answer within so many seconds. Ctrl-C ends the waiting."""
        self._thread.join(max(seconds, 0.0))
        return bool(self._answers)

    def answer(self) -> Any:
        """What the call returned; what it raised is raised."""
        answer, error = self._answers[0]
        if error is not None:
            raise error
        return answer

    def _run(self, ask: Callable[[], Any]) -> None:
        try:
            self._answers.append((ask(), None))
        except Exception as error:
            self._answers.append((None, error))


def within(seconds: float, ask: Callable[[], Any]) -> Any:
    """What ``ask`` returns or raises, if it does so in time. torch's stores may wait for their server for ever.

    Raises:
        Silent: no answer within ``seconds``.

    Example::

        within(5.0, lambda: store.get('key'))
    """
    question = Question(ask)
    if not question.answered(seconds):
        raise Silent(f'no answer in {seconds:.1f} seconds')
    return question.answer()
