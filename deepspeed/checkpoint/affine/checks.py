# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Argument checks that the pieces, the maps and their constructors share."""

import math
import operator
from collections.abc import Mapping

# No parameter, shard or stride pattern may span more elements than this. It leaves a factor of two to the int64
# range, so a sum of an offset and a reach cannot wrap, and it is far beyond any tensor that exists.
MAX_ELEMENTS = 2**62

# More axes than any tensor has; a limit keeps the padding of columns in proportion to the input.
MAX_AXES = 64

# More ranks than any job has. Maps have an entry for each, so a count that is a slip must not ask for all memory.
MAX_RANKS = 2**24

# The most elements that are looked at, or reported, one by one; some dozens of bytes each.
WALK_LIMIT = 2**28


def integer(value, what):
    """Return ``value`` as a plain int; ``what`` names it in messages.

    Raises:
        TypeError: anything that is no integer; a bool counts as none.

    Example::

        >>> integer(numpy.int64(3), 'world_size')
        3
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f'{what} must be an integer, but it is {shown(value)}.') from None


def integers(values, what):
    """Return ``values`` as a tuple of plain ints; ``what`` names them in messages.

    Raises:
        TypeError: no sequence, or a member that is no integer.
    """
    try:
        items = tuple(values)
    except TypeError:
        raise TypeError(f'{what} must be a sequence of integers, but it is {shown(values)}.') from None
    return tuple(integer(item, f'{what}[{index}]') for index, item in enumerate(items))


def groups(values, what):
    """Return ``values`` as a tuple of tuples of plain ints; ``what`` names them in messages.

    Raises:
        TypeError: no sequence of sequences of integers.
    """
    try:
        rows = tuple(values)
    except TypeError:
        raise TypeError(f'{what} must be a sequence of sequences of integers, but it is {shown(values)}.') from None
    return tuple(integers(row, f'{what}[{index}]') for index, row in enumerate(rows))


def span(shape):
    """Return the number of elements of ``shape`` with its empty axes counted as one.

    Row-major strides of an empty shape can be huge although it has no element, so sizes are limited by this number.
    """
    count = 1
    for size in shape:
        count *= max(size, 1)
    return count


def sizes(shape, what):
    """Return ``shape`` as a tuple of ints that can be the shape of a tensor; ``what`` names it in messages.

    Raises:
        ValueError: a negative size, or more elements than addresses reach.

    Example::

        >>> sizes(torch.Size([4, 3]), 'shape')
        (4, 3)
    """
    checked = integers(shape, what)
    if any(size < 0 for size in checked):
        raise ValueError(f'{what} {checked} has a negative size; every size must be zero or more.')
    if span(checked) > MAX_ELEMENTS:
        raise ValueError(f'{what} {checked} spans more than 2**62 elements, which no address can reach.')
    return checked


def axis_index(dim, shape, what):
    """Return ``dim`` as an index from 0 into ``shape``; negative values count from the end.

    Raises:
        IndexError: ``shape`` has no such axis.
    """
    axis = integer(dim, what)
    if not -len(shape) <= axis < len(shape):
        raise IndexError(f'{what} is {axis}, but a parameter of shape {shape} has {len(shape)} axes.')
    return axis % len(shape)


def widths(values, what):
    """Return ``values`` as a tuple of ints; ``what`` names them in messages.

    Raises:
        ValueError: a negative one, or more than 2**62 together.
    """
    checked = integers(values, what)
    for index, value in enumerate(checked):
        if value < 0:
            raise ValueError(f'{what}[{index}] is {shown(value)}; it must be zero or more.')
    if sum(checked) > MAX_ELEMENTS:
        raise ValueError(f'{what} add up to more than 2**62, which no address can reach.')
    return checked


def count(value, what):
    """Return ``value`` as an int; ``what`` names it in messages.

    Raises:
        ValueError: less than zero, or more than 2**62.
    """
    checked = integer(value, what)
    if not 0 <= checked <= MAX_ELEMENTS:
        raise ValueError(f'{what} is {shown(checked)}; it must lie between 0 and 2**62.')
    return checked


def rank_count(value, what, least=0):
    """Return ``value``, a number of ranks, as an int; ``what`` names it in messages.

    Raises:
        ValueError: less than ``least``, or more than 2**24.
    """
    checked = integer(value, what)
    if not least <= checked <= MAX_RANKS:
        raise ValueError(f'{what} is {shown(checked)}; it must lie between {least} and 2**24, more ranks than any job '
                         'has.')
    return checked


def mapping(value, what):
    """Return ``value``, a mapping; ``what`` names it in messages.

    Raises:
        TypeError: anything else.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f'{what} must be a mapping, but it is {shown(value)}.')
    return value


def is_invertible(value):
    """Whether a number, an int or a float, is a finite factor other than zero."""
    try:
        return value != 0 and math.isfinite(value)
    except OverflowError:
        # An int beyond every float.
        return False


def listed(ids):
    """Ids for a message: all of them, or the first eight.

    >>> listed(range(3)), listed(range(100))
    ('[0, 1, 2]', '[0, 1, 2, 3, 4, 5, 6, 7, ...]')
    """
    ids = list(ids)
    return str(ids) if len(ids) <= 8 else f'{str(ids[:8])[:-1]}, ...]'


def shown(value):
    """A value for a message: itself if it is short and plain, else its type. Its own repr is not trusted."""
    if type(value) is int and value.bit_length() > 128:
        return f'an integer of {value.bit_length()} bits'
    if type(value) is str:
        return repr(value if len(value) <= 40 else value[:40] + '...')
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    return f'a value of type {type(value).__name__}'
