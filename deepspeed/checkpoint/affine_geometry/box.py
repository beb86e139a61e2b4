# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One axis-aligned box of integer coordinates.

The columnar modules beside this one do the same arithmetic for many boxes at once; this class is
for messages, small cases and readers.
"""

from dataclasses import dataclass
from typing import List, Tuple

from deepspeed.checkpoint.affine_geometry.strides import product


@dataclass(frozen=True)
class LogicalBox:
    """A block of coordinates: ``origin[k] <= x[k] < origin[k] + extent[k]`` on every axis.

    >>> LogicalBox((0, 2), (4, 3)).upper()
    (4, 5)
    """
    origin: Tuple[int, ...]
    extent: Tuple[int, ...]

    def __post_init__(self):
        if len(self.origin) != len(self.extent):
            raise ValueError(f'A box needs one extent per axis: origin {self.origin} has {len(self.origin)} axes, '
                             f'extent {self.extent} has {len(self.extent)}.')

    @property
    def volume(self) -> int:
        """Number of coordinates inside; 1 for a box of no axes."""
        return product(self.extent)

    @property
    def is_empty(self) -> bool:
        return any(size <= 0 for size in self.extent)

    def upper(self) -> Tuple[int, ...]:
        """The first coordinate beyond the box on every axis."""
        return tuple(stop for _, stop in self._sides())

    def intersection(self, other: 'LogicalBox') -> 'LogicalBox':
        """The coordinates in both boxes; extents are 0 on axes where they do not meet."""
        shared = [(max(mine[0], theirs[0]), min(mine[1], theirs[1]))
                  for mine, theirs in zip(self._sides(), other._sides())]
        return LogicalBox(tuple(start for start, _ in shared), tuple(max(stop - start, 0) for start, stop in shared))

    def contains(self, other: 'LogicalBox') -> bool:
        """Whether the other box keeps within this one's bounds on every axis."""
        return all(mine[0] <= theirs[0] and theirs[1] <= mine[1]
                   for mine, theirs in zip(self._sides(), other._sides()))

    def _sides(self) -> List[Tuple[int, int]]:
        """The interval ``[start, stop)`` on every axis."""
        return [(start, start + size) for start, size in zip(self.origin, self.extent)]

    def __repr__(self) -> str:
        ranges = ', '.join(f'{start}:{stop}' for start, stop in self._sides())
        return f'Box[{ranges}]'


def subtract(region: LogicalBox, cut: LogicalBox) -> List[LogicalBox]:
    """Disjoint boxes that hold exactly what ``region`` has outside ``cut``; at most two per axis.

    >>> subtract(LogicalBox((0, ), (5, )), LogicalBox((1, ), (2, )))
    [Box[0:1], Box[3:5]]
    """
    if region.is_empty:
        return []
    hole = region.intersection(cut)
    if hole.is_empty:
        return [region]
    rest = []
    low, high = list(region.origin), list(region.upper())
    for axis, (hole_low, hole_high) in enumerate(zip(hole.origin, hole.upper())):
        # The slabs before and after the hole leave; what goes on to the next axis is level with it.
        for first, last in ((low[axis], hole_low), (hole_high, high[axis])):
            if first < last:
                origin = (*low[:axis], first, *low[axis + 1:])
                upper = (*high[:axis], last, *high[axis + 1:])
                rest.append(LogicalBox(origin, tuple(stop - start for start, stop in zip(origin, upper))))
        low[axis], high[axis] = hole_low, hole_high
    return rest
