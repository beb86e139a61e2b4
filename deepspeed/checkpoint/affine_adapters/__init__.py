# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps and buffers taken from what others hold: here, from live ZeRO-3 parameters."""

from deepspeed.checkpoint.affine_adapters.zero3 import zero3_parameter

__all__ = ['zero3_parameter']
