# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks of small AutoTP training runs that save, convert and load universal checkpoints. Needs DeepSpeed.

Everything is small, in float32 and drawn from fixed seeds. What a rank returns is its own part: the test puts the
parts of the ranks together.
"""

import argparse
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Optional

import torch

HIDDEN, INNER, HEADS, HEAD_WIDTH, VOCABULARY, LAYERS = 32, 64, 8, 4, 101, 2
SAMPLES, TOKENS = 2, 8
LEARNING_RATE = 1e-2
STATES = ("fp32", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Training:
    """One run of one job.

    Attributes:
        model: a key of MODELS. kv_heads: its key and value heads; it has HEADS query heads.
        tp: tensor-parallel degree. stage: of ZeRO.
        start, stop: the steps that it takes.
        load, save: tag of the universal checkpoint to begin from, and of the checkpoint to write after ``save_at``.
    """
    model: str
    tp: int
    stage: int = 1
    kv_heads: int = 4
    start: int = 0
    stop: int = 4
    load: Optional[str] = None
    save: Optional[str] = None
    save_at: int = 2


def train(rank, world_size, training, folder):
    """Train, and return what this rank saw: ``{"begin": state, "steps": [...]}``, with an entry for each step."""
    engine = make_engine(MODELS[training.model](training.kv_heads),
                         training.tp,
                         training.stage,
                         data_parallel=world_size // training.tp,
                         load_universal=training.load is not None)
    if training.load is not None:
        engine.load_checkpoint(str(folder), tag=training.load)
    begin = _state(engine) if training.load is not None else None
    steps = []
    for step in range(training.start, training.stop):
        steps.append(take_step(engine, step, rank // training.tp, world_size // training.tp))
        if training.save is not None and step + 1 == training.save_at:
            engine.save_checkpoint(str(folder), tag=training.save)
    return {"begin": begin, "steps": steps}


def convert(rank, world_size, folder, tag, options):
    """Run DeepSpeed's converter with two workers for each phase; returns which file its maps came from."""
    from deepspeed.checkpoint import ds_to_universal
    arguments = dict(input_folder=f"{folder}/{tag}",
                     output_folder=f"{folder}/{tag}_universal",
                     num_extract_workers=2,
                     num_merge_workers=2,
                     keep_temp_folder=False,
                     strict=True,
                     inject_missing_state=False)
    ds_to_universal.main(argparse.Namespace(**{**arguments, **options}))
    import deepspeed.checkpoint.affine
    return deepspeed.checkpoint.affine.__file__


def make_engine(model, tp, stage, data_parallel=1, load_universal=False):
    import deepspeed
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": SAMPLES // data_parallel,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage
        },
        "tensor_parallel": {
            "autotp_size": tp,
            **getattr(model, "tensor_parallel", {})
        },
        "checkpoint": {
            "load_universal": load_universal
        },
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def take_step(engine, step, data_rank, data_parallel):
    """Each data-parallel rank takes its own samples of one global batch, so the batch is the same for any layout."""
    from deepspeed.utils import safe_get_full_grad
    tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(step))
    entry = {"loss": {}, "logits": {}}
    for sample in range(data_rank, SAMPLES, data_parallel):
        given = tokens[sample:sample + 1]
        output = engine(input_ids=given, labels=given)
        engine.backward(output.loss)
        entry["loss"][sample], entry["logits"][sample] = output.loss.detach(), output.logits.detach()
        if sample + data_parallel >= SAMPLES:
            entry["grads"] = {name: _kept(safe_get_full_grad(param), param) for name, param in _parameters(engine)}
        engine.step()
    entry["state"] = _state(engine)
    return entry


def _state(engine):
    """fp32 weights and Adam moments of this rank's tensor-parallel shards, and all step counters."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    state = {name: {"fp32": _kept(safe_get_full_fp32_param(param), param)} for name, param in _parameters(engine)}
    for name, param in _parameters(engine):
        for key in STATES[1:]:
            state[name][key] = _kept(safe_get_full_optimizer_state(param, key), param)
    counters = {float(one["step"]) for one in engine.optimizer.optimizer.state.values()}
    return {"parameters": state, "counters": sorted(counters), "global_steps": engine.global_steps}


def _parameters(engine):
    return engine.module.named_parameters()


def _kept(tensor, param):
    # An empty shard has a shape, but DeepSpeed keeps nothing for it.
    return (param if tensor is None and param.numel() == 0 else tensor).detach().clone()


def llama(kv_heads, tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY,
                    hidden_size=HIDDEN,
                    intermediate_size=INNER,
                    num_hidden_layers=LAYERS,
                    num_attention_heads=HEADS,
                    num_key_value_heads=kv_heads,
                    max_position_embeddings=TOKENS,
                    tie_word_embeddings=tied,
                    attn_implementation="eager"))


def tied_llama(kv_heads):
    return llama(kv_heads, tied=True)


class FusedBlock(torch.nn.Module):
    """Attention with one weight for q, k and v and a gated network with one for gate and up, all with biases."""

    def __init__(self, kv_heads):
        super().__init__()
        self.queries_per_key = HEADS // kv_heads
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(HIDDEN), torch.nn.LayerNorm(HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, (HEADS + 2 * kv_heads) * HEAD_WIDTH)
        self.out = torch.nn.Linear(HEADS * HEAD_WIDTH, HIDDEN)
        self.gate_up = torch.nn.Linear(HIDDEN, 2 * INNER)
        self.down = torch.nn.Linear(INNER, HIDDEN)

    def forward(self, hidden):
        hidden = hidden + self.out(self._attend(self.qkv(self.norm_1(hidden))))
        gate, up = self.gate_up(self.norm_2(hidden)).chunk(2, dim=-1)
        return hidden + self.down(torch.nn.functional.silu(gate) * up)

    def _attend(self, qkv):
        # The widths of this rank's share: it has whole key and value heads, each with its queries.
        batch, tokens, width = qkv.shape
        kv_heads = width // HEAD_WIDTH // (self.queries_per_key + 2)
        q, k, v = qkv.view(batch, tokens, -1,
                           HEAD_WIDTH).transpose(1, 2).split([kv_heads * self.queries_per_key, kv_heads, kv_heads],
                                                             dim=1)
        k, v = (one.repeat_interleave(self.queries_per_key, dim=1) for one in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(HEAD_WIDTH)
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v
        return mixed.transpose(1, 2).reshape(batch, tokens, -1)


class FusedDecoder(torch.nn.Module):

    def __init__(self, kv_heads):
        super().__init__()
        torch.manual_seed(2)
        self.config = SimpleNamespace(hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=kv_heads)
        q, kv = HEADS * HEAD_WIDTH, kv_heads * HEAD_WIDTH
        # DeepSpeed's own description of how to cut the layers.
        specs = [
            dict(patterns=[r".*\.qkv\.weight$"], partition_type="column", shape=[[q, kv, kv], -1], partition_dim=0),
            dict(patterns=[r".*\.gate_up\.weight$"], partition_type="column", shape=[2, -1], partition_dim=0),
            dict(patterns=[r".*\.(out|down)\.weight$"], partition_type="row"),
            dict(patterns=[r"lm_head\.weight$"], partition_type="column", gather_output=True),
        ]
        self.tensor_parallel = {"partition_config": {"use_default_specs": False, "layer_specs": specs}}
        self.embed = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = torch.nn.ModuleList([FusedBlock(kv_heads) for _ in range(LAYERS)])
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.lm_head(self.norm(hidden))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return SimpleNamespace(loss=loss, logits=logits)


MODELS = {"llama": llama, "tied": tied_llama, "fused": FusedDecoder}
