# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Ranks whose AutoTP layers describe their parameters: what they publish, and what our adapter makes of it.

Needs DeepSpeed.
"""

from typing import Callable, NamedTuple

import torch
import torch.distributed as dist

from affine_universal_processes import HEADS, HIDDEN, MODELS, TOKENS, VOCABULARY, make_engine, take_step

KV_HEADS = 4


def publish(rank, world_size, kind):
    """What an engine over ``world_size`` tensor-parallel ranks publishes, beside its own shards and the whole."""
    model = _model(kind)
    whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    module = make_engine(model, world_size, stage=0).module
    return {
        "published": module.universal_checkpoint_info,
        "whole": whole,
        "shards": {
            name: param.detach().clone()
            for name, param in module.named_parameters()
        },
        "class": _class_of_maps()
    }


def publish_layers(rank, world_size, kind):
    """The same of a module made of layers that DeepSpeed puts into models other than those above."""
    import deepspeed
    from deepspeed.module_inject.layers import collect_autotp_universal_checkpoint_info, set_autotp_mode
    deepspeed.init_distributed("gloo")
    set_autotp_mode(training=True)
    torch.manual_seed(4)
    layer = LAYERS[kind]
    module = torch.nn.Module()
    module.layer = torch.nn.Linear(HIDDEN, layer.rows, bias=layer.bias)
    if layer.norm:
        module.norm = torch.nn.LayerNorm(HIDDEN)
    whole = {name: param.detach().clone() for name, param in module.named_parameters()}
    module.layer = layer.make(module.layer, dist.group.WORLD)
    return {
        "published": collect_autotp_universal_checkpoint_info(module),
        "whole": whole,
        "shards": {
            name: param.detach().clone()
            for name, param in module.named_parameters()
        },
        "states a map": {
            f"layer.{name}": "affine_map" in param.ds_autotp_universal_checkpoint_meta["conversion"]
            for name, param in module.layer.named_parameters()
        },
        "adapter": _adapted(module)
    }


def describe(rank, world_size, kind, tp, stage, kv_heads, groups):
    """What ``autotp_maps`` says before a step, and what its buffers and the engine hold after it."""
    import deepspeed
    from deepspeed.checkpoint.affine_adapters.autotp import autotp_maps
    engine = make_engine(MODELS[kind](kv_heads), tp, stage, data_parallel=world_size // tp)
    held = autotp_maps(engine, tensor_parallel_groups=groups)
    take_step(engine, 0, rank // tp, world_size // tp)
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    answer = {"held": {}, "shards": {}, "buffers": {}}
    for name, one in held.items():
        if name not in parameters:
            buffer, = one.buffers.values()
            answer["buffers"][name] = (one.layout.to_dict(), torch.equal(buffer, engine.module.get_buffer(name)))
            continue
        with deepspeed.zero.GatheredParameters([parameters[name]], enabled=stage == 3):
            answer["shards"][name] = parameters[name].detach().clone()
        answer["held"][name] = (one.layout.to_dict(), dict(one.buffers), one.tied_to)
    return answer


def refuse(rank, world_size):
    """The messages of what ``autotp_maps`` refuses, by case."""
    engine = make_engine(MODELS["llama"](KV_HEADS), 2, stage=3, data_parallel=world_size // 2)
    messages = {
        "other groups": _adapted(engine, tensor_parallel_groups=[[0, 2], [1, 3]]),
        "groups in another order": _adapted(engine, tensor_parallel_groups=[[2, 3], [0, 1]]),
        "no layers": _adapted(torch.nn.Linear(2, 2)),
    }
    weight = engine.module.lm_head.weight
    del weight.ds_autotp_universal_checkpoint_meta["conversion"]["affine_map"]
    messages["no map"] = _adapted(engine)
    messages["another cut"] = _adapted(_convolution(torch.nn.Linear(HIDDEN, HIDDEN, bias=False), dist.group.WORLD))
    return messages


def _adapted(module, **options):
    """{name: (layout, buffers)}, or the message of a refusal."""
    from deepspeed.checkpoint.affine_adapters.autotp import autotp_maps
    try:
        held = autotp_maps(module, **options)
    except ValueError as error:
        return str(error)
    return {name: (one.layout.to_dict(), dict(one.buffers)) for name, one in held.items()}


def _class_of_maps():
    """Which class the layers of this DeepSpeed describe themselves with."""
    from deepspeed.module_inject import layers
    stated = layers._derive_affine_map(tp_world_size=2,
                                       logical_shape=(4, 2),
                                       partition_dim=0,
                                       partition_sizes=(2, 2),
                                       sub_param_shard_widths=None,
                                       replicated=False,
                                       unsupported_reason=None)
    return type(stated).__module__


def _model(kind):
    return MODELS[kind](KV_HEADS) if kind in MODELS else OTHER_MODELS[kind]()


def _opt():
    """Separate q, k and v with biases; row-parallel layers with a bias; tied embeddings that stay whole."""
    from transformers import OPTConfig, OPTForCausalLM
    return OPTForCausalLM(
        OPTConfig(vocab_size=VOCABULARY,
                  hidden_size=HIDDEN,
                  word_embed_proj_dim=HIDDEN,
                  num_attention_heads=HEADS,
                  num_hidden_layers=1,
                  ffn_dim=2 * HIDDEN,
                  max_position_embeddings=TOKENS))


def _mpt():
    """q, k and v as three parts of one weight."""
    from transformers import MptConfig, MptForCausalLM
    return MptForCausalLM(
        MptConfig(vocab_size=VOCABULARY, d_model=HIDDEN, n_heads=HEADS, n_layers=1, max_seq_len=TOKENS))


def _bigcode():
    """Queries that are cut beside one key and value head that every rank holds."""
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM
    return GPTBigCodeForCausalLM(
        GPTBigCodeConfig(vocab_size=VOCABULARY,
                         n_embd=HIDDEN,
                         n_head=HEADS,
                         n_layer=1,
                         n_inner=2 * HIDDEN,
                         n_positions=TOKENS,
                         multi_query=True,
                         bos_token_id=0,
                         eos_token_id=0))


OTHER_MODELS = {"opt": _opt, "mpt": _mpt, "bigcode": _bigcode}


class CodeGenBlock(torch.nn.Module):
    """DeepSpeed knows the layout of a fused weight by the name of the block that it belongs to."""


def _meta(heads):
    from deepspeed.module_inject.tp_shard import AutoTPMeta
    return AutoTPMeta(num_kv_heads=heads, num_attention_heads=heads, n_embd=HIDDEN)


def _codegen(linear, group):
    from deepspeed.module_inject.layers import fused_LinearLayer
    return fused_LinearLayer(linear, group, fused_module=CodeGenBlock(), tp_meta=_meta(8))


def _yuan_values(linear, group):
    from deepspeed.module_inject.layers import Yuan_LinearLayer
    return Yuan_LinearLayer(linear, group, tp_meta=_meta(8))


def _yuan_output(linear, group):
    from deepspeed.module_inject.layers import Yuan_LinearAllreduce
    return Yuan_LinearAllreduce(linear, group, tp_meta=_meta(8))


def _yuan_odd_heads(linear, group):
    """Three heads for each rank: two ranks then hold the same head, which a layout of blocks does not describe."""
    from deepspeed.module_inject.layers import Yuan_LinearLayer
    return Yuan_LinearLayer(linear, group, tp_meta=_meta(6))


def _convolution(linear, group):
    """It cuts its columns, and states that it cuts its rows."""
    from deepspeed.module_inject.layers import conv_LinearLayer
    return conv_LinearLayer(linear, group, tp_meta=_meta(8))


def _experts(linear, group):
    """Rows that are seen as three experts with rows of their own, of which each rank has some."""
    from deepspeed.module_inject.layers import SubParamLinearLayer
    return SubParamLinearLayer(linear, group, shape=(3, -1, HIDDEN), partition_dim=1, tp_meta=_meta(8))


class Layer(NamedTuple):
    """A function that makes it, its rows, whether it has a bias, and whether a norm that is not cut is beside it."""
    make: Callable
    rows: int
    bias: bool
    norm: bool


# Where there is no bias, DeepSpeed 0.19.8 cannot cut one.
LAYERS = {
    "codegen": Layer(_codegen, 96, bias=False, norm=False),
    "experts": Layer(_experts, 48, bias=True, norm=True),
    "yuan values": Layer(_yuan_values, 32, bias=True, norm=True),
    "yuan output": Layer(_yuan_output, 32, bias=False, norm=True),
    "yuan odd heads": Layer(_yuan_odd_heads, 24, bias=True, norm=False),
    "yuan odd heads, norm": Layer(_yuan_odd_heads, 24, bias=True, norm=True),
}
