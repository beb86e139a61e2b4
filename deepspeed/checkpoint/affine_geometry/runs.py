# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Lowering flat row-major runs to boxes.

A run ``[a, b)`` of an N-axis tensor is a ragged staircase: it may start inside a row, go on over whole
rows, planes and so on, and end inside a row. Climbing from the innermost axis to the outermost and
down again meets every step once, so ``2N - 1`` boxes are always enough.
"""

import numpy as np

from deepspeed.checkpoint.affine_geometry.box import LogicalBox
from deepspeed.checkpoint.affine_geometry.strides import offsets_to_coordinates, product, row_major_strides


def lower_runs(shape, starts, stops):
    """Cut flat runs of a row-major tensor into boxes, in address order.

    Args:
        shape: the tensor's shape, N axes.
        starts, stops: int64[n], elements; ``0 <= start <= stop <= product(shape)``. Empty runs give no box.

    Returns:
        ``(run, lower, extent)``: int64[m], int64[m, N], int64[m, N]; box i belongs to run ``run[i]``.
        At most ``max(1, 2N - 1)`` boxes per run, and within a run they follow each other in flat order.

    Raises:
        ValueError: a run that lies outside the tensor.

    >>> run, lower, extent = lower_runs((3, 4), [2], [11])
    >>> [tuple(map(int, row)) for row in np.hstack([lower, extent])]
    [(0, 2, 1, 2), (1, 0, 1, 4), (2, 0, 1, 3)]
    """
    starts = np.asarray(starts, np.int64).reshape(-1)
    stops = np.asarray(stops, np.int64).reshape(-1)
    outside = (starts < 0) | (stops < starts) | (stops > product(shape))
    if outside.any():
        bad = int(np.argmax(outside))
        raise ValueError(
            f'Run {bad} is [{starts[bad]}, {stops[bad]}), which is no run of the {product(shape)} elements '
            f'of a tensor of shape {tuple(shape)}.')
    ndim = len(shape)
    if ndim == 0 or product(shape) == 0:
        run = np.flatnonzero(stops > starts)
        return run, np.zeros((len(run), ndim), np.int64), np.ones((len(run), ndim), np.int64)

    strides = row_major_strides(shape)
    cursor = starts.copy()
    steps = []
    # Up to the outermost axis: on axis k go to the next multiple of a whole index of axis k - 1.
    for axis in range(ndim - 1, 0, -1):
        coarse = strides[axis - 1]
        steps.append((axis, np.minimum(-(-cursor // coarse) * coarse, stops - stops % strides[axis])))
        cursor = np.maximum(cursor, steps[-1][1])
    # Across it, and down again: on each axis go as far as whole indices of it reach.
    steps += [(axis, stops - stops % strides[axis]) for axis in range(ndim)]

    cursor = starts.copy()
    runs, offsets, extents = [], [], []
    for axis, reach in steps:
        run = np.flatnonzero(reach > cursor)
        extent = np.ones((len(run), ndim), np.int64)
        extent[:, axis] = (reach[run] - cursor[run]) // strides[axis]
        extent[:, axis + 1:] = shape[axis + 1:]
        runs.append(run)
        offsets.append(cursor[run])
        extents.append(extent)
        cursor = np.maximum(cursor, reach)
    run, offset, extent = np.concatenate(runs), np.concatenate(offsets), np.concatenate(extents)
    order = np.lexsort((offset, run))
    return run[order], offsets_to_coordinates(offset[order], shape), extent[order]


def lower_run(shape, start, stop):
    """One run as a list of ``LogicalBox``; see ``lower_runs``.

    >>> lower_run((3, 4), 2, 8)
    [Box[0:1, 2:4], Box[1:2, 0:4]]
    """
    _, lower, extent = lower_runs(shape, [start], [stop])
    return [LogicalBox(tuple(low), tuple(size)) for low, size in zip(lower.tolist(), extent.tolist())]
