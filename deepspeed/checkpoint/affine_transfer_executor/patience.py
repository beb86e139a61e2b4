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


def within(seconds: float, question: Callable[[], Any]) -> Any:
    """What ``question`` returns or raises, if it does so in time.

    It is asked in a thread of its own, as torch's stores may wait for their server for ever. A thread without
    an answer is left behind; it ends no later than the process.

    Raises:
        Silent: no answer within ``seconds``.

    Example::

        within(5.0, lambda: store.get('key'))
    """
    answers: List[Tuple[Any, Any]] = []

    def ask() -> None:
        try:
            answers.append((question(), None))
        except Exception as error:
            answers.append((None, error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
    if not answers:
        raise Silent(f'no answer in {seconds:.1f} seconds')
    answer, error = answers[0]
    if error is not None:
        raise error
    return answer
