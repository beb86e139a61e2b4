# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whether strided regions of memory share a byte, answered without walking their elements."""

from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch

from deepspeed.checkpoint.affine_geometry.addresses import (AddressCollisionError, AddressLayoutError,
                                                            check_addresses_apart)

# Pairs of regions that are proved apart at one time.
PAIRS = 4096


@dataclass(frozen=True)
class Region:
    """The bytes of a strided view.

    Attributes:
        device: where they are.
        start: address of the first byte.
        axes: ``(size, stride in bytes)`` of each axis longer than one, the bytes of an element included, widest
            stride first; axes that continue each other are one, so that equal regions have equal axes.
    """
    device: torch.device
    start: int
    axes: Tuple[Tuple[int, int], ...]

    @classmethod
    def of(cls, view: torch.Tensor) -> 'Region':
        """The region of a tensor that has elements."""
        width = view.element_size()
        axes = [(size, stride * width) for size, stride in zip(view.shape, view.stride()) if size > 1]
        if width > 1:
            axes.append((width, 1))
        joined: List[Tuple[int, int]] = []
        for size, stride in sorted(axes, key=lambda axis: axis[1], reverse=True):
            if joined and joined[-1][1] == size * stride:
                joined[-1] = joined[-1][0] * size, stride
            else:
                joined.append((size, stride))
        return cls(view.device, view.data_ptr(), tuple(joined))

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.start + 1 + sum((size - 1) * stride for size, stride in self.axes)

    def meets_itself(self) -> bool:
        """Whether two elements may share memory, as in an expanded tensor."""
        span = 0
        for size, stride in reversed(self.axes):
            if stride <= span:
                return True
            span += (size - 1) * stride
        return False


def clashes(ones: Sequence[Region], others: Sequence[Region]) -> Iterator[Tuple[int, int]]:
    """Index pairs, one of each, that are not proved to share no byte."""
    # One proof over everything is much cheaper than one per pair: views of one buffer may all have meeting hulls.
    try:
        apart = _collision(list({*ones, *others})) is None
    except AddressLayoutError:
        apart = False
    if not apart:
        yield from _unproved(ones, others, meeting_pairs(ones, others))
        return
    places: Dict[Region, List[int]] = {}
    for index, region in enumerate(others):
        places.setdefault(region, []).append(index)
    yield from ((one, other) for one, region in enumerate(ones) for other in places.get(region, ()))


def first_clash(regions: Sequence[Region]) -> Optional[Tuple[int, int]]:
    """Two regions, by index, that are not proved to share no byte, or None. None of them may meet itself."""
    try:
        found = _collision(regions)
        return None if found is None else (min(found), max(found))
    except AddressLayoutError:
        pairs = [pair for pair in meeting_pairs(regions, regions) if pair[0] < pair[1]]
        return next(_unproved(regions, regions, pairs), None)


def _collision(regions: Sequence[Region]) -> Optional[Tuple[int, int]]:
    """Two regions that share a byte, perhaps twice the same one, or None where there are none.

    Raises:
        AddressLayoutError: it cannot be told.
    """
    if not regions:
        return None
    devices = {device: number for number, device in enumerate({region.device for region in regions})}
    try:
        check_addresses_apart(np.array([devices[region.device] for region in regions], np.int64), *_blocks(regions))
    except AddressCollisionError as error:
        return error.blocks
    return None


def _unproved(ones: Sequence[Region], others: Sequence[Region], pairs: List[Tuple[int,
                                                                                  int]]) -> Iterator[Tuple[int, int]]:
    """Of pairs which are on one device each, those that are not proved apart, in order."""
    blocks = _blocks([*ones, *others])
    rows = np.array(pairs, np.int64).reshape(-1, 2) + (0, len(ones))
    waiting = [slice(low, min(low + PAIRS, len(pairs))) for low in reversed(range(0, len(pairs), PAIRS))]
    while waiting:
        part = waiting.pop()
        picked = rows[part].reshape(-1)
        try:
            check_addresses_apart(np.arange(len(picked)) // 2, *(column[picked] for column in blocks))
        except (AddressCollisionError, AddressLayoutError):
            middle = (part.start + part.stop) // 2
            if middle == part.start:
                yield pairs[middle]
            else:
                waiting += [slice(middle, part.stop), slice(part.start, middle)]


def _blocks(regions: Sequence[Region]) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, extent and strides of regions, as ``check_addresses_apart`` takes them."""
    base = min((region.start for region in regions), default=0)
    start = np.array([region.start - base for region in regions], np.int64)
    extent = np.ones((len(regions), max([1, *(len(region.axes) for region in regions)])), np.int64)
    strides = np.zeros_like(extent)
    for row, region in enumerate(regions):
        # Steps of zero reach no further byte.
        for axis, (size, stride) in enumerate((size, stride) for size, stride in region.axes if stride):
            extent[row, axis], strides[row, axis] = size, stride
    return start, extent, strides


def meeting_pairs(ones: Sequence[Region], others: Sequence[Region]) -> List[Tuple[int, int]]:
    """Index pairs of regions whose hulls meet, by a sweep over their starts."""
    events = sorted([(region.start, 0, index)
                     for index, region in enumerate(ones)] + [(region.start, 1, index)
                                                              for index, region in enumerate(others)])
    sides = (ones, others)
    active: Tuple[List[int], List[int]] = ([], [])
    pairs = []
    for start, side, index in events:
        for which in (0, 1):
            active[which][:] = [held for held in active[which] if sides[which][held].stop > start]
        # Their hulls all contain this address, but perhaps on another device.
        for held in active[1 - side]:
            if sides[1 - side][held].device == sides[side][index].device:
                pairs.append((held, index) if side else (index, held))
        active[side].append(index)
    return pairs
