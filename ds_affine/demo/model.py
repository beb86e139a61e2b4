# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A small decoder with the shapes of Llama: grouped-query attention, gated MLP, RMS norms, a separate head."""

import torch
from torch import nn
from torch.nn import functional

LAYERS = 2
HIDDEN = 32
HEAD_DIM = 8
HEADS = 4
KV_HEADS = 2
INTERMEDIATE = 48
VOCABULARY = 101  # divides by no number of ranks
FROZEN_PREFIXES = ("embed_tokens.", "layers.0.mlp.")


class RMSNorm(nn.Module):

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, hidden):
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, hidden):
        query, key, value = (self._heads(projection(hidden)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, dim=1) for tensor in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    @staticmethod
    def _heads(tensor):
        return tensor.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


class MLP(nn.Module):

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, hidden):
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):

    def __init__(self):
        super().__init__()
        self.input_layernorm = RMSNorm()
        self.self_attn = Attention()
        self.post_attention_layernorm = RMSNorm()
        self.mlp = MLP()

    def forward(self, hidden):
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Model(nn.Module):

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm = RMSNorm()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens):
        """Loss of predicting each next token of tokens, int64[batch, length]."""
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.lm_head(self.norm(hidden))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build_model():
    """The same model, with the same weights, on every process; some of its parameters are frozen."""
    torch.manual_seed(20)
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not is_frozen(name)
    return model


def parameter_shapes():
    """The shape of every parameter by name, in the model's order."""
    return {name: tuple(parameter.shape) for name, parameter in build_model().named_parameters()}


def is_frozen(name):
    return name.startswith(FROZEN_PREFIXES)


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def training_tokens(rank):
    """A batch of int64[4, 12] token ids, another one on each trainer."""
    return torch.randint(VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(rank))
