# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Boxes, strides and columnar joins: the geometry that maps, planner and checks share.

Everything here is about integer coordinates and addresses in elements; it knows no pieces and no tensors. Users of
maps and plans need none of it. Start here:

- ``lower_run`` cuts a flat run into boxes (``LogicalBox``);
- ``overlapping_pairs`` joins two lists of boxes, ``unbalanced_groups`` tells whether they cover the same coordinates;
- ``address_boxes`` makes boxes of strided addresses.
"""

from deepspeed.checkpoint.affine_geometry.addresses import (AddressBoxes, AddressCollisionError, AddressLayoutError,
                                                            address_boxes, check_addresses_apart)
from deepspeed.checkpoint.affine_geometry.box import LogicalBox, subtract
from deepspeed.checkpoint.affine_geometry.cover import find_overlap, unbalanced_groups, uncovered
from deepspeed.checkpoint.affine_geometry.join import PairLimitError, overlapping_pairs
from deepspeed.checkpoint.affine_geometry.merge import BlockPairs, MergeLimitError, merge_blocks
from deepspeed.checkpoint.affine_geometry.runs import lower_run, lower_runs
from deepspeed.checkpoint.affine_geometry.strides import (offset_to_coordinate, offsets_to_coordinates, product,
                                                          row_major_strides)

__all__ = [
    'AddressBoxes', 'AddressCollisionError', 'AddressLayoutError', 'BlockPairs', 'LogicalBox', 'MergeLimitError',
    'PairLimitError', 'address_boxes', 'check_addresses_apart', 'find_overlap', 'lower_run', 'lower_runs',
    'merge_blocks', 'offset_to_coordinate', 'offsets_to_coordinates', 'overlapping_pairs', 'product',
    'row_major_strides', 'subtract', 'unbalanced_groups', 'uncovered'
]
