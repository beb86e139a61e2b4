# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Waiting with an end."""

import queue
import threading
from contextlib import suppress
from typing import Any, Callable, Optional, Tuple

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
    """A call that is made elsewhere, and whose end one may wait for.

    Args:
        answers: a queue that gets what the call returned and what it raised, one of them None.
    """

    def __init__(self, answers: Any):
        self._answers = answers
        self._answer: Optional[Tuple[Any, Any]] = None

    def answered(self, seconds: float) -> bool:
        """Whether there is an answer within so many seconds. Ctrl-C ends the waiting."""
        with suppress(queue.Empty):
            self._answer = self._answer or self._answers.get(timeout=max(seconds, 0.0))
        return self._answer is not None

    def answer(self) -> Any:
        """What the call returned; what it raised is raised."""
        answer, error = self._answer
        if error is not None:
            raise error
        return answer


class Helper:
    """A thread that answers one question after another and ends with this object.

    One that gets no answer is left behind; it ends no later than the process.
    """

    def __init__(self):
        self._questions: Any = queue.SimpleQueue()
        threading.Thread(target=_answer_all, args=(self._questions, ), daemon=True).start()

    def __del__(self):
        self._questions.put(None)

    def ask(self, call: Callable[[], Any]) -> Question:
        """A question whose answer ``call`` gives, after those that were asked before."""
        answers: Any = queue.SimpleQueue()
        self._questions.put((call, answers))
        return Question(answers)


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What ``call`` returns or raises, if it does so in time. torch's stores may wait for their server for ever.

    Raises:
        Silent: no answer within ``seconds``.

    Example::

        within(5.0, lambda: store.get('key'))
    """
    question = Helper().ask(call)
    if not question.answered(seconds):
        raise Silent(f'no answer in {seconds:.1f} seconds')
    return question.answer()


def _answer_all(questions: Any) -> None:
    while (question := questions.get()) is not None:
        call, answers = question
        answered = [_answer(call)]
        # Whoever hears the answer may want what the call was about to be free, such as a port: nothing is kept here.
        del question, call
        answers.put(answered.pop())


def _answer(call: Callable[[], Any]) -> Tuple[Any, Any]:
    try:
        return call(), None
    except BaseException as error:
        # Of any kind: it is the asking thread's to deal with.
        return None, error
