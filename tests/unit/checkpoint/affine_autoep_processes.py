# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks of a small mixture-of-experts model whose experts AutoEP has placed. Needs DeepSpeed."""

from types import SimpleNamespace

import torch

HIDDEN, INNER, VOCABULARY, LAYERS, EXPERTS = 32, 16, 101, 2, 4
STOP, SAVE_AT = 4, 2
WEIGHTS = ("w1", "w2", "w3")
NAMES = [f"model.layers.{layer}.mlp.experts.{weight}" for layer in range(LAYERS) for weight in WEIGHTS]
OTHERS = [
    "model.embed_tokens.weight", "lm_head.weight",
    *(f"model.layers.{layer}.{name}" for layer in range(LAYERS)
      for name in ("norm.weight", "norm.bias", "mlp.router.gate.weight"))
]


def train(rank, world_size, ep_size, stage, folder, save, settings=None):
    """Train and save after SAVE_AT steps: the losses of all steps, and this rank's experts and the other parameters
    when it saved."""
    engine = _engine(ep_size, stage, settings=settings)
    losses = []
    for step in range(STOP):
        losses.append(_take_step(engine, step, rank))
        if step + 1 == SAVE_AT:
            engine.save_checkpoint(str(folder), tag=save)
            experts, others = _experts(engine, stage), _whole(engine, stage, OTHERS)
    return {"losses": losses, "experts": experts, "others": others}


def resume(rank, world_size, ep_size, stage, folder, load, save):
    """Load a universal checkpoint, save at once, and train on."""
    engine = _engine(ep_size, stage, load_universal=True)
    engine.load_checkpoint(str(folder), tag=load)
    engine.save_checkpoint(str(folder), tag=save)
    experts = _experts(engine, stage)
    _give_each_state_a_counter(engine)
    return {"losses": [_take_step(engine, step, rank) for step in range(SAVE_AT, STOP)], "experts": experts}


def describe(rank, world_size, ep_size, stage, groups):
    """What ``autoep_maps`` says before a step, and the experts that this rank holds after it."""
    from deepspeed.checkpoint.affine_adapters.autoep import autoep_maps
    engine = _engine(ep_size, stage)
    held = autoep_maps(engine, expert_parallel_groups=groups)
    stated = {
        name: param.ds_autoep_uc_meta["affine_map"]
        for name, param in engine.module.named_parameters() if name in NAMES
    }
    _take_step(engine, 0, rank)
    return {
        "held": {
            name: (one.layout.to_dict(), dict(one.buffers))
            for name, one in held.items()
        },
        "experts": _experts(engine, stage),
        "stated": stated,
        "messages": _refusals(engine)
    }


def _refusals(engine):
    """The messages of what ``autoep_maps`` refuses, by case."""
    from deepspeed.checkpoint.affine_adapters.autoep import autoep_maps

    def message(module, **options):
        try:
            autoep_maps(module, **options)
        except ValueError as error:
            return str(error)
        return None

    messages = {
        "no layers": message(torch.nn.Linear(2, 2)),
        "other groups": message(engine, expert_parallel_groups=[[0, 3], [1, 2]])
    }
    metadata = engine.module.get_parameter(NAMES[0]).ds_autoep_uc_meta
    placement = metadata["expert_placement"]
    metadata["expert_placement"] = {
        **placement, "ranks": [{
            "rank": 0,
            "experts": [0]
        }, {
            "rank": 1,
            "experts": [1, 2, 3]
        }]
    }
    messages["other placement"] = message(engine)
    return messages


def _engine(ep_size, stage, load_universal=False, settings=None):
    import deepspeed
    model = MoeDecoder()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": stage
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 1e-2,
                "torch_adam": True
            }
        },
        "expert_parallel": {
            "enabled": True,
            "autoep_size": ep_size,
            "preset_model": "mixtral",
            "use_grouped_mm": False
        },
        "checkpoint": {
            "load_universal": load_universal
        },
        **(settings or {}),
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def _take_step(engine, step, rank):
    """Every rank has a batch of its own, which does not depend on where the experts are."""
    tokens = torch.randint(VOCABULARY, (1, 8), generator=torch.Generator().manual_seed(10 * step + rank))
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def _experts(engine, stage):
    return _whole(engine, stage, NAMES)


def _whole(engine, stage, names):
    """Parameters without ZeRO's cuts; experts are those of this rank."""
    import deepspeed
    values = {}
    for name in names:
        param = engine.module.get_parameter(name)
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            values[name] = param.detach().clone()
    return values


def _give_each_state_a_counter(engine):
    """DeepSpeed 0.19.8 restores one step tensor into the states of all groups of parameters under ZeRO-3.

    Every group then counts it up at every step. With a tensor each they count as in the training that went on.
    """
    for state in engine.optimizer.optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


class Experts(torch.nn.Module):
    """The weights of all experts, as transformers' Mixtral has them. AutoEP replaces the block that they are in."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 6)
        self.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / 6)


class MoeBlock(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()


class MoeLayer(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.mlp = MoeBlock()

    def forward(self, hidden):
        return hidden + self.mlp(self.norm(hidden))


class MoeDecoder(torch.nn.Module):

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.config = SimpleNamespace(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2)
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.model.layers = torch.nn.ModuleList([MoeLayer() for _ in range(LAYERS)])
        self.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids, labels):
        hidden = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            hidden = layer(hidden)
        logits = self.lm_head(hidden)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return SimpleNamespace(loss=loss, logits=logits)
