# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Plans made by hand for executor tests, without the planner that they will later be used with."""

from typing import Dict, List, Sequence

import torch

from deepspeed.checkpoint.affine_transfer import SegmentColumns, TransferPlan, TransferSegment


def plan_of(segments: Sequence[TransferSegment], shape, source_numel, target_numel) -> TransferPlan:
    columns = SegmentColumns.from_segments(segments, ndim=len(shape))
    return TransferPlan.from_columns(columns, shape, source_numel, target_numel)


def bounds(total: int, parts: int, part: int):
    """Where part number ``part`` of ``parts`` uneven ones starts and ends; late parts may be empty."""
    width = -(-total // parts)
    return min(part * width, total), min((part + 1) * width, total)


def matrix_plan(rows: int, columns: int, row_parts: int, column_parts: int, scales=(1.0, 1.0)) -> TransferPlan:
    """From row blocks (source locations 0 up) to column blocks (target locations 0 up)."""
    segments = []
    for target in range(column_parts):
        left, right = bounds(columns, column_parts, target)
        for source in range(row_parts):
            top, bottom = bounds(rows, row_parts, source)
            if left < right and top < bottom:
                segments.append(
                    TransferSegment(source, left, (columns, 1), target, top * (right - left), (right - left, 1),
                                    (bottom - top, right - left), *scales))
    source_numel = {
        part: (high - low) * columns
        for part in range(row_parts)
        for low, high in [bounds(rows, row_parts, part)]
    }
    target_numel = {
        part: (high - low) * rows
        for part in range(column_parts)
        for low, high in [bounds(columns, column_parts, part)]
    }
    return plan_of(segments, (rows, columns), source_numel, target_numel)


def matrix_source(full: torch.Tensor, row_parts: int, part: int) -> torch.Tensor:
    low, high = bounds(full.shape[0], row_parts, part)
    return full[low:high].clone()


def matrix_target(full: torch.Tensor, column_parts: int, part: int) -> torch.Tensor:
    low, high = bounds(full.shape[1], column_parts, part)
    return full[:, low:high].contiguous()


def element_plan(numel: int, sources: Dict[int, List[int]], targets: Dict[int, List[int]]) -> TransferPlan:
    """From and to shards that are given as lists of the parameter's elements: runs of one axis."""
    held = {}
    for location, elements in sources.items():
        for address, element in enumerate(elements):
            held.setdefault(element, (location, address))
    segments = []
    for location, elements in targets.items():
        start = 0
        for stop in range(1, len(elements) + 1):
            first, step = held[elements[start]], stop - start
            if stop < len(elements) and held[elements[stop]] == (first[0], first[1] + step):
                continue
            segments.append(TransferSegment(first[0], first[1], (1, ), location, start, (1, ), (step, )))
            start = stop
    return plan_of(segments, (numel, ), {
        key: len(value)
        for key, value in sources.items()
    }, {
        key: len(value)
        for key, value in targets.items()
    })


def values(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Flat values of any dtype, from their bits: every one of them must arrive."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel, ), generator=generator).bool()
    bits = torch.randint(0, 256, (numel * dtype.itemsize, ), dtype=torch.uint8, generator=generator)
    return bits.view(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit, NaNs too."""
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and torch.equal(*bits)


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
          torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
          torch.uint16, torch.uint32, torch.uint64, torch.bool)
