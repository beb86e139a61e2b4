# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Reading plain values that nobody vouches for, with errors that say where they stand."""

from collections.abc import Mapping
from typing import Sequence, Tuple

from deepspeed.checkpoint.affine.checks import MAX_ELEMENTS, is_invertible, shown
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError

# A location id is a name and no address: any int64 will do.
SMALLEST_ID, LARGEST_ID = -2**63, 2**63 - 1


def expect_keys(entry, where: str, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Require a mapping with these keys and no others.

    Unknown keys are refused: they could change the meaning of what is read.
    """
    if not isinstance(entry, Mapping):
        raise AffineTransferError(f'{where} is a {type(entry).__name__}; expected a dict')
    missing = [key for key in required if key not in entry]
    if missing:
        raise AffineTransferError(f'{where} has no {missing[0]!r}')
    for key in entry:
        if key not in required and key not in optional:
            raise AffineTransferError(f'{where} has the unknown key {shown(key)}; expected {list(required)}')


def expect_list(value, where: str) -> None:
    """Require a list or tuple."""
    if not isinstance(value, (list, tuple)):
        raise AffineTransferError(f'{where} is {shown(value)}; expected a list')


def integer(value, where: str, low: int) -> int:
    """Require a number of elements: an integer from ``low`` to ``MAX_ELEMENTS``."""
    return _between(value, where, low, MAX_ELEMENTS)


def location(value, where: str) -> int:
    """Require the id of a location."""
    return _between(value, where, SMALLEST_ID, LARGEST_ID)


def integers(value, where: str, low: int) -> Tuple[int, ...]:
    """Require a list of such integers."""
    expect_list(value, where)
    return tuple(integer(item, f'{where}[{position}]', low) for position, item in enumerate(value))


def scale(value, where: str) -> float:
    """Require a finite number other than zero."""
    if type(value) not in (int, float):
        raise AffineTransferError(f'{where} is {shown(value)}; expected a number')
    if not is_invertible(value):
        raise AffineTransferError(f'{where} is {shown(value)}, which is not invertible')
    return float(value)


def _between(value, where: str, low: int, high: int) -> int:
    if type(value) is not int:
        raise AffineTransferError(f'{where} is {shown(value)}; expected an integer')
    if not low <= value <= high:
        raise AffineTransferError(f'{where} is {shown(value)}; expected {low} to {high}')
    return value
