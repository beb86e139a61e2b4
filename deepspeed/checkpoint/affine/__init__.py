# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How a parameter lies in shards: pieces, maps, and the layouts that they describe.

Start here:

- a constructor that makes the ``ParamAffineMap`` of a layout: ``replicated_map``, ``contiguous_split_map``,
  ``sub_param_map``, ``zero3_partition_map``;
- several layouts at once, or what is left of one: ``union_affine_maps``, ``keep_locations``, and ``location_ids`` and
  ``relabel`` for ids that do not collide;
- storage: ``dump_affine_maps``, ``load_affine_maps``.
"""

from deepspeed.checkpoint.affine.algebra import concat_affine_maps, keep_locations, narrow, permute, relabel
from deepspeed.checkpoint.affine.beside import newer_names
from deepspeed.checkpoint.affine.columns import PieceColumns
from deepspeed.checkpoint.affine.composition import compose
from deepspeed.checkpoint.affine.constructors import (block_gather_map, contiguous_split_map, replicated_map,
                                                      segmented_map, sub_param_map)
from deepspeed.checkpoint.affine.envelope import dump_affine_maps, load_affine_maps
from deepspeed.checkpoint.affine.labels import location_ids
from deepspeed.checkpoint.affine.param_map import ParamAffineMap
from deepspeed.checkpoint.affine.partitions import flat_partition_map, zero3_partition_map
from deepspeed.checkpoint.affine.piece import AffinePiece
from deepspeed.checkpoint.affine.serialization import AFFINE_MAP_FORMAT_VERSION
from deepspeed.checkpoint.affine.tensors import SCALE_POWER_BY_STATE, _scaled  # noqa: F401 (DeepSpeed's tests use it)
from deepspeed.checkpoint.affine.union import union_affine_maps
from deepspeed.checkpoint.affine.validation import CoverageError

__all__ = [
    'AFFINE_MAP_FORMAT_VERSION', 'AffinePiece', 'CoverageError', 'ParamAffineMap', 'PieceColumns',
    'SCALE_POWER_BY_STATE', 'block_gather_map', 'compose', 'concat_affine_maps', 'contiguous_split_map',
    'dump_affine_maps', 'flat_partition_map', 'keep_locations', 'load_affine_maps', 'location_ids', 'narrow',
    'permute', 'relabel', 'replicated_map', 'segmented_map', 'sub_param_map', 'union_affine_maps',
    'zero3_partition_map'
]

globals().update(newer_names())
