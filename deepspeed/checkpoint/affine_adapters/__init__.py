# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps and buffers taken from what others hold. Start here:

- ``zero3_parameter`` describes a live parameter of a ZeRO-3 engine and hands out this process' part of it.
"""

from deepspeed.checkpoint.affine_adapters.zero3 import zero3_parameter

__all__ = ['zero3_parameter']
