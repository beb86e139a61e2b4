# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What each shard must be: gather the whole parameters, then cut them with plain torch. No affine map is used here."""

import torch

from ds_affine.demo.layouts import ROLLOUTS, cut_axis


def cut(full, parts, rank):
    """The shard of one rank.

    full: whole parameters by name. parts: the names that are put end to end in the shard.
    """
    return torch.cat([_cut_one(name, full[name], rank) for name in parts])


def _cut_one(name, tensor, rank):
    if tensor.dim() == 1:
        return tensor
    return tensor.tensor_split(ROLLOUTS, dim=cut_axis(name))[rank]


def former_shard(name, tensor, rank):
    """What a rollout holds of a frozen parameter from its former placement."""
    return tensor.tensor_split(ROLLOUTS, dim=1 - cut_axis(name))[rank].contiguous()


def same_bits(one, other):
    """Equal shape, dtype and bytes: NaNs and signed zeros must match too."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
