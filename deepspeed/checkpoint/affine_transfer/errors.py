# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What planning and reading plans can raise."""

from contextlib import contextmanager


class AffineTransferError(ValueError):
    """Base of all planner errors, and the error itself for an exhausted budget or an unreadable stored plan."""


class InvalidMapError(AffineTransferError):
    """The maps (or a plan and its maps) are inconsistent, so any data moved by them would be wrong.

    Repair the map; there is no fallback.
    """


class UnsupportedLayoutError(AffineTransferError):
    """A consistent layout outside what strided copies of boxes can express."""


class InvalidReplicaPolicyError(AffineTransferError):
    """A replica policy answered with something that is not one of the holders it was offered."""


@contextmanager
def naming(name):
    """Say which parameter an error is about; the kind of error stays."""
    try:
        yield
    except AffineTransferError as error:
        raise type(error)(f'parameter {name!r}: {error}') from None
