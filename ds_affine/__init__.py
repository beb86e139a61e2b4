# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command line of deepspeed-affine. It stands outside `deepspeed/` so that asking for help imports nothing."""
