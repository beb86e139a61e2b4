# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Shapes, row-major strides and flat offsets, in elements."""

import itertools
import math
import operator

import numpy as np


def product(shape):
    """Number of elements of a tensor of this shape, as a Python int that cannot overflow.

    >>> product((3, 4)), product(())
    (12, 1)
    """
    return math.prod(map(int, shape))


def row_major_strides(shape):
    """Strides, in elements, of a densely packed row-major tensor.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    # The innermost axis steps by one, and every other by as much as the axes inside it hold.
    inner = [int(size) for size in shape[:0:-1]]
    return tuple(itertools.accumulate(inner, operator.mul, initial=1))[::-1] if len(shape) else ()


def offset_to_coordinate(offset, shape):
    """Coordinate of a row-major flat offset, or None where the offset lies outside the shape.

    >>> offset_to_coordinate(7, (2, 4))
    (1, 3)
    """
    if not 0 <= offset < product(shape):
        return None
    coordinate = []
    for stride in row_major_strides(shape):
        index, offset = divmod(offset, stride)
        coordinate.append(index)
    return tuple(coordinate)


def offsets_to_coordinates(offsets, shape):
    """Columnar ``offset_to_coordinate``: int64[n] flat offsets, all inside the shape, to int64[n, N]."""
    coordinates = np.empty((len(offsets), len(shape)), np.int64)
    rest = offsets
    for axis, stride in enumerate(row_major_strides(shape)):
        coordinates[:, axis], rest = np.divmod(rest, stride)
    return coordinates
