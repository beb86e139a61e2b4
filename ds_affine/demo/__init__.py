# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The demo: a small model's weights go from ZeRO-3 trainers to tensor-parallel rollouts, checked bit for bit."""
