# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What running a plan can raise."""

import traceback
from typing import Optional


class AffineTransferExecutionError(ValueError):
    """A transfer that was refused before it began, was found wrong, or broke while it ran; the message says which.

    Refused: every process of the group raises it, no target has changed and the group can be used again.
    Found wrong, with ``verify``: likewise, but targets have changed, unless they are ``staged``.
    Broken (a peer died or was late): that is a TransferBrokenError; targets may be partly written.
    """


class TransferBrokenError(AffineTransferExecutionError):
    """A transfer that broke: its group cannot be used again, nor a program that was compiled for it. Or a program that
    cannot be used again, for the reason that the message gives."""


class Explained(Exception):
    """A failure whose text says all there is to say."""


def described(error: BaseException) -> str:
    """What an exception says, in characters that can be sent and printed. It may be anybody's: nothing is trusted."""
    try:
        text = str(error)
    except Exception:
        text = 'its text cannot be made'
    kind = type(error).__name__
    explains = isinstance(error, (ValueError, Explained)) and text
    words = text if explains else f'{kind}: {text}' if text else kind
    # gloo's errors end with advice about its own logs.
    words = words.partition('. This is typically caused by')[0]
    return words.encode(errors='backslashreplace').decode()


def forget_locals(error: Optional[BaseException]) -> None:
    """Forget the local variables where an exception, and what led to it, was raised.

    torch's handles are among them. As long as somebody keeps the exception, they would keep the group's connections
    and its store, and nobody could listen at the store's address.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
