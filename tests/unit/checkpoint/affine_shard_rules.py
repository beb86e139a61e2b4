# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whole parameters of the models in affine_universal_processes, put together from AutoTP shards by name.

The rules are those of tensor parallelism, written with torch alone: nothing here knows a map.
"""

import torch

from affine_universal_processes import HEADS, VOCABULARY

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")
COLUMNS = ("o_proj", "down_proj", "out", "down")


def whole_parameter(name, shards, kv_heads):
    """The parameter, or anything that is cut like it, whose shards are given in the order of the ranks."""
    layer, kind = name.split(".")[-2:]
    if layer in COLUMNS and kind == "weight":
        return torch.cat(shards, dim=1)
    if layer == "qkv":
        return _joined(shards, [HEADS // kv_heads, 1, 1])
    if layer == "gate_up":
        return _joined(shards, [1, 1])
    if layer in ROWS and not (layer == "embed_tokens" and len(shards[0]) == VOCABULARY):
        return torch.cat(shards)
    for shard in shards[1:]:
        assert torch.equal(shard, shards[0]), f"the ranks have different copies of {name}"
    return shards[0]


def _joined(shards, parts):
    """Every shard has a slice of each part, one after the other; ``parts`` are their proportions."""
    slices = [shard.split([len(shard) // sum(parts) * part for part in parts]) for shard in shards]
    return torch.cat([piece for part in zip(*slices) for piece in part])
