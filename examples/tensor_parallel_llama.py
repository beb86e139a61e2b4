# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One rank of a tensor-parallel Llama in plain torch, with the fused parameters of an inference server."""

import torch
import torch.distributed as dist
from torch.nn import functional

ROPE_BASE = 10000.0
NORM_EPSILON = 1e-6


class TensorParallelLlama:
    """The forward pass over this rank's shards.

    Args:
        model: ``DecoderModel`` with the sizes of the whole model.
        weights: server parameter name -> this rank's tensor. They may be written to between calls.

    The ranks of the default process group are the tensor-parallel ranks.
    """

    def __init__(self, model, weights):
        self.model = model
        self.weights = weights
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    @torch.no_grad()
    def logits(self, tokens):
        """float[batch, length, vocabulary] for tokens int64[batch, length], on every rank the same."""
        hidden = self._embed(tokens)
        rotation = _rotation(tokens.shape[1], self.model.head_dim)
        for index in range(self.model.num_hidden_layers):
            layer = f'model.layers.{index}.'
            normed = _norm(hidden, self.weights[layer + 'input_layernorm.weight'])
            hidden = hidden + self._attention(layer + 'self_attn.', normed, rotation)
            normed = _norm(hidden, self.weights[layer + 'post_attention_layernorm.weight'])
            hidden = hidden + self._mlp(layer + 'mlp.', normed)
        hidden = _norm(hidden, self.weights['model.norm.weight'])
        own = functional.linear(hidden, self.weights['lm_head.weight'])
        parts = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(parts, own)
        # The rows after the vocabulary are padding.
        return torch.cat(parts, dim=-1)[..., :self.model.vocab_size]

    def generate(self, tokens, length, generator):
        """Sample until the sequences have ``length`` tokens. Rank 0 draws for all."""
        while tokens.shape[1] < length:
            probabilities = self.logits(tokens)[:, -1].softmax(-1)
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            dist.broadcast(drawn, 0)
            tokens = torch.cat([tokens, drawn], dim=1)
        return tokens

    def _embed(self, tokens):
        rows = self.weights['model.embed_tokens.weight']
        own = tokens - self.rank * len(rows)
        here = (own >= 0) & (own < len(rows))
        return _summed(rows[own.where(here, 0)] * here.unsqueeze(-1))

    def _attention(self, prefix, hidden, rotation):
        model = self.model
        heads = model.num_attention_heads // self.ranks
        kv_heads = max(model.num_key_value_heads // self.ranks, 1)
        fused = functional.linear(hidden, self.weights[prefix + 'qkv_proj.weight'])
        fused = fused.unflatten(-1, (-1, model.head_dim)).transpose(1, 2)
        query, key, value = fused.split([heads, kv_heads, kv_heads], dim=1)
        query, key = _rotated(query, rotation), _rotated(key, rotation)
        key, value = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return _summed(functional.linear(mixed.transpose(1, 2).flatten(2), self.weights[prefix + 'o_proj.weight']))

    def _mlp(self, prefix, hidden):
        gate, up = functional.linear(hidden, self.weights[prefix + 'gate_up_proj.weight']).chunk(2, dim=-1)
        return _summed(functional.linear(functional.silu(gate) * up, self.weights[prefix + 'down_proj.weight']))


def _summed(partial):
    dist.all_reduce(partial)
    return partial


def _norm(hidden, weight):
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + NORM_EPSILON) * weight


def _rotation(length, head_dim):
    """Cosine and sine of the rotary angles, float[length, head_dim / 2] each."""
    frequencies = ROPE_BASE**(-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(length), frequencies)
    return angles.cos(), angles.sin()


def _rotated(heads, rotation):
    """Element i of a head's first half and element i of its second half are turned together."""
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
