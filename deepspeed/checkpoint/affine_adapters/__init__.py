# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps and buffers taken from what others hold. Start here:

- ``zero3_maps`` describes all parameters of a live ZeRO-3 model and hands out this process' part of them;
  ``zero3_master_maps`` does so for the fp32 weights, ``zero3_secondary_maps`` for hpZ's second partitions, and
  ``zero3_parameter`` for one parameter;
- ``zero12_master_maps`` for the fp32 partitions of ZeRO-1 and 2; ``replicated_maps`` for what every rank holds whole;
- ``autotp_maps`` for a model under AutoTP and ``autoep_maps`` for experts (``autoep_placement_map`` without a
  model), with ZeRO-3 on top too;
- ``dtensor_map`` for a DTensor (``placement_map`` without a process group);
- ``open_checkpoint`` for files: of a DeepSpeed engine, universal ones, safetensors;
- ``server_layout`` is the target: a Llama or Qwen model as an inference server holds it.
"""

from deepspeed.checkpoint.affine_adapters.autoep import autoep_maps, autoep_placement_map
from deepspeed.checkpoint.affine_adapters.autotp import autotp_maps
from deepspeed.checkpoint.affine_adapters.checkpoints import open_checkpoint
from deepspeed.checkpoint.affine_adapters.dtensor import dtensor_map
from deepspeed.checkpoint.affine_adapters.held import HeldParameter
from deepspeed.checkpoint.affine_adapters.placements import placement_map
from deepspeed.checkpoint.affine_adapters.replicated import replicated_buffers, replicated_maps
from deepspeed.checkpoint.affine_adapters.server import DecoderModel, ServerLayout, ServerPart, server_layout
from deepspeed.checkpoint.affine_adapters.stored import Checkpoint, CheckpointError
from deepspeed.checkpoint.affine_adapters.zero3 import zero3_maps, zero3_parameter
from deepspeed.checkpoint.affine_adapters.zero3_master import zero3_master_maps
from deepspeed.checkpoint.affine_adapters.zero3_secondary import zero3_secondary_maps
from deepspeed.checkpoint.affine_adapters.zero12 import zero12_master_maps

__all__ = [
    'Checkpoint', 'CheckpointError', 'DecoderModel', 'HeldParameter', 'ServerLayout', 'ServerPart', 'autoep_maps',
    'autoep_placement_map', 'autotp_maps', 'dtensor_map', 'open_checkpoint', 'placement_map', 'replicated_buffers',
    'replicated_maps', 'server_layout', 'zero12_master_maps', 'zero3_maps', 'zero3_master_maps', 'zero3_parameter',
    'zero3_secondary_maps'
]
