# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The layout of an inference server, against what its weight loaders do with whole tensors.

``Loader`` below is written from the definition of vLLM's loaders, with plain torch; it uses no map.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.affine import (contiguous_split_map, relabel, replicated_map, union_affine_maps,
                                         zero3_partition_map)
from deepspeed.checkpoint.affine_adapters.server import DecoderModel, server_layout
from deepspeed.checkpoint.affine_transfer import TransferEndpoints, plan_transfer, plan_transfers
from deepspeed.checkpoint.affine_transfer_executor import apply_plan

UNTOUCHED = -1
SMALL = DecoderModel(hidden_size=3,
                     intermediate_size=8,
                     num_hidden_layers=2,
                     num_attention_heads=4,
                     num_key_value_heads=2,
                     head_dim=2,
                     vocab_size=5)
LLAMA_3_8B = DecoderModel(hidden_size=4096,
                          intermediate_size=14336,
                          num_hidden_layers=32,
                          num_attention_heads=32,
                          num_key_value_heads=8,
                          head_dim=128,
                          vocab_size=128256)
QWEN_2_5_05B = DecoderModel(hidden_size=896,
                            intermediate_size=4864,
                            num_hidden_layers=24,
                            num_attention_heads=14,
                            num_key_value_heads=2,
                            head_dim=64,
                            vocab_size=151936,
                            qkv_bias=True,
                            tie_word_embeddings=True)

# Parameter tables of the published checkpoints: shapes of one layer, shapes outside the layers, parameters in all.
TABLES = {
    'llama-3-8b': (LLAMA_3_8B, {
        'input_layernorm.weight': (4096, ),
        'self_attn.q_proj.weight': (4096, 4096),
        'self_attn.k_proj.weight': (1024, 4096),
        'self_attn.v_proj.weight': (1024, 4096),
        'self_attn.o_proj.weight': (4096, 4096),
        'post_attention_layernorm.weight': (4096, ),
        'mlp.gate_proj.weight': (14336, 4096),
        'mlp.up_proj.weight': (14336, 4096),
        'mlp.down_proj.weight': (4096, 14336),
    }, {
        'model.embed_tokens.weight': (128256, 4096),
        'model.norm.weight': (4096, ),
        'lm_head.weight': (128256, 4096),
    }, 291),
    'qwen2.5-0.5b': (QWEN_2_5_05B, {
        'input_layernorm.weight': (896, ),
        'self_attn.q_proj.weight': (896, 896),
        'self_attn.k_proj.weight': (128, 896),
        'self_attn.v_proj.weight': (128, 896),
        'self_attn.o_proj.weight': (896, 896),
        'self_attn.q_proj.bias': (896, ),
        'self_attn.k_proj.bias': (128, ),
        'self_attn.v_proj.bias': (128, ),
        'post_attention_layernorm.weight': (896, ),
        'mlp.gate_proj.weight': (4864, 896),
        'mlp.up_proj.weight': (4864, 896),
        'mlp.down_proj.weight': (896, 4864),
    }, {
        'model.embed_tokens.weight': (151936, 896),
        'model.norm.weight': (896, ),
    }, 290),
}


def parameter_shapes(model):
    """Shapes by Hugging Face name."""
    hidden, queries = model.hidden_size, model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    shapes = {'model.embed_tokens.weight': (model.vocab_size, hidden), 'model.norm.weight': (hidden, )}
    if not model.tie_word_embeddings:
        shapes['lm_head.weight'] = (model.vocab_size, hidden)
    for index in range(model.num_hidden_layers):
        layer = f'model.layers.{index}'
        for norm in ('input_layernorm', 'post_attention_layernorm'):
            shapes[f'{layer}.{norm}.weight'] = (hidden, )
        for part, rows in (('q', queries), ('k', keys), ('v', keys)):
            shapes[f'{layer}.self_attn.{part}_proj.weight'] = (rows, hidden)
            if model.qkv_bias:
                shapes[f'{layer}.self_attn.{part}_proj.bias'] = (rows, )
            if model.qk_norm and part != 'v':
                shapes[f'{layer}.self_attn.{part}_norm.weight'] = (model.head_dim, )
        shapes[f'{layer}.self_attn.o_proj.weight'] = (hidden, queries)
        for part in ('gate', 'up'):
            shapes[f'{layer}.mlp.{part}_proj.weight'] = (model.intermediate_size, hidden)
        shapes[f'{layer}.mlp.down_proj.weight'] = (hidden, model.intermediate_size)
    return shapes


def parameters(model, dtype=torch.int64):
    """Whole parameters; no two elements of the model are equal."""
    shapes = parameter_shapes(model)
    elements = torch.arange(sum(map(math.prod, shapes.values()))).to(dtype)
    return {
        name: part.reshape(shape)
        for (name, shape), part in zip(shapes.items(), elements.split([math.prod(s) for s in shapes.values()]))
    }


class Loader:
    """What one rank of the server holds after it has loaded the whole parameters."""

    def __init__(self, model, tp_degree, vocab_multiple, rank):
        self.model, self.tp_degree, self.rank = model, tp_degree, rank
        self.padded_vocabulary = math.ceil(model.vocab_size / vocab_multiple) * vocab_multiple

    def load(self, full):
        held = {name: tensor.clone() for name, tensor in full.items() if 'norm' in name}
        held['model.embed_tokens.weight'] = self._vocabulary(full['model.embed_tokens.weight'])
        if not self.model.tie_word_embeddings:
            held['lm_head.weight'] = self._vocabulary(full['lm_head.weight'])
        for index in range(self.model.num_hidden_layers):
            attention, mlp = f'model.layers.{index}.self_attn', f'model.layers.{index}.mlp'
            for kind in ('weight', 'bias') if self.model.qkv_bias else ('weight', ):
                held[f'{attention}.qkv_proj.{kind}'] = self._qkv(*(full[f'{attention}.{part}_proj.{kind}']
                                                                   for part in 'qkv'))
            held[f'{attention}.o_proj.weight'] = self._row_parallel(full[f'{attention}.o_proj.weight'])
            held[f'{mlp}.gate_up_proj.weight'] = self._merged_columns(full[f'{mlp}.gate_proj.weight'],
                                                                      full[f'{mlp}.up_proj.weight'])
            held[f'{mlp}.down_proj.weight'] = self._row_parallel(full[f'{mlp}.down_proj.weight'])
        return held

    def _qkv(self, query, key, value):
        model = self.model
        heads = model.num_attention_heads // self.tp_degree
        if self.tp_degree >= model.num_key_value_heads:
            kv_heads, replicas = 1, self.tp_degree // model.num_key_value_heads
        else:
            kv_heads, replicas = model.num_key_value_heads // self.tp_degree, 1
        shard = []
        for tensor, count, number in ((query, heads, self.rank), (key, kv_heads, self.rank // replicas),
                                      (value, kv_heads, self.rank // replicas)):
            shard.append(tensor.narrow(0, number * count * model.head_dim, count * model.head_dim))
        return torch.cat(shard)

    def _merged_columns(self, *tensors):
        rows = self.model.intermediate_size // self.tp_degree
        return torch.cat([tensor.narrow(0, self.rank * rows, rows) for tensor in tensors])

    def _row_parallel(self, tensor):
        columns = tensor.shape[1] // self.tp_degree
        return tensor.narrow(1, self.rank * columns, columns).contiguous()

    def _vocabulary(self, tensor):
        rows = self.padded_vocabulary // self.tp_degree
        shard = torch.full((rows, tensor.shape[1]), UNTOUCHED, dtype=tensor.dtype)
        for row in range(rows):
            if self.rank * rows + row < tensor.shape[0]:
                shard[row] = tensor[self.rank * rows + row]
        return shard


def hold(full, layout, ranks, axis=0):
    """Map and buffers of one parameter in a trainer of so many ranks, cut with plain torch."""
    if layout == 'replicated' or layout == 'tensor_parallel' and full.dim() <= axis:
        return replicated_map(full.shape, ranks), {rank: full.clone() for rank in range(ranks)}
    if layout == 'zero3':
        size = math.ceil(full.numel() / ranks)
        return zero3_partition_map(full.shape, ranks), {
            rank: full.flatten()[rank * size:(rank + 1) * size].clone()
            for rank in range(ranks)
        }
    parts = full.tensor_split(ranks, dim=axis)
    return contiguous_split_map(full.shape, [part.shape[axis] for part in parts], axis), dict(enumerate(parts))


def trainer(full, layout, ranks):
    """Maps and buffers by name; tensor-parallel trainers cut what follows a cut layer by columns, as AutoTP does."""
    held = {
        name: hold(tensor, layout, ranks, 1 if name.endswith(('o_proj.weight', 'down_proj.weight')) else 0)
        for name, tensor in full.items()
    }
    return {name: layout for name, (layout, _) in held.items()}, {name: part for name, (_, part) in held.items()}


def loaded(model, tp_degree, vocab_multiple, full):
    return [Loader(model, tp_degree, vocab_multiple, rank).load(full) for rank in range(tp_degree)]


def served(expected, copies, dtype=torch.int64):
    """Tensors as the server made them before it has any weights: {parameter: {location: tensor}}."""
    return {
        name: {
            location: torch.full(expected[rank][name].shape, UNTOUCHED, dtype=dtype)
            for ids in copies
            for rank, location in enumerate(ids)
        }
        for name in expected[0]
    }


def check_served(tensors, expected, copies):
    for ids in copies:
        for rank, location in enumerate(ids):
            for name, shard in expected[rank].items():
                assert torch.equal(tensors[name][location], shard), (name, rank, location)


@st.composite
def servers(draw):
    """A model, a degree, a vocabulary multiple and locations that fit together."""
    tp_degree = draw(st.integers(1, 8))
    shared = draw(st.sampled_from([degree for degree in range(1, 9) if tp_degree % degree == 0]))
    kv_heads = tp_degree // shared * (draw(st.integers(1, 3)) if shared == 1 else 1)
    heads = math.lcm(tp_degree, kv_heads) * draw(st.integers(1, 2))
    model = DecoderModel(hidden_size=draw(st.integers(1, 5)),
                         intermediate_size=tp_degree * draw(st.integers(1, 3)),
                         num_hidden_layers=draw(st.integers(1, 2)),
                         num_attention_heads=heads,
                         num_key_value_heads=kv_heads,
                         head_dim=draw(st.integers(1, 3)),
                         vocab_size=draw(st.integers(1, 40)),
                         qkv_bias=draw(st.booleans()),
                         qk_norm=draw(st.booleans()),
                         tie_word_embeddings=draw(st.booleans()))
    copies = draw(st.integers(1, 3))
    ids = draw(st.permutations(range(-2, copies * tp_degree - 2)))
    return model, tp_degree, tp_degree * draw(st.integers(1, 4)), [
        ids[copy * tp_degree:(copy + 1) * tp_degree] for copy in range(copies)
    ]


@given(servers(), st.sampled_from(['replicated', 'zero3', 'tensor_parallel']), st.integers(1, 5))
def test_every_shard_is_what_the_loader_cuts(server, layout, trainers):
    model, tp_degree, vocab_multiple, copies = server
    full = parameters(model)
    expected = loaded(model, tp_degree, vocab_multiple, full)
    tensors = served(expected, copies)
    source_maps, source_buffers = trainer(full, layout, trainers)

    described = server_layout(model, tp_degree, vocab_multiple=vocab_multiple, locations=copies)
    endpoints = TransferEndpoints({rank: rank
                                   for rank in range(trainers)},
                                  {location: trainers
                                   for ids in copies
                                   for location in ids})
    plan = plan_transfers(described.transfers(source_maps, torch.int64), endpoints=endpoints)
    targets = described.buffers(tensors)
    assert set(plan) == set(targets) == set(full)
    for name in plan:
        apply_plan(plan[name], source_buffers[name], targets[name])
    check_served(tensors, expected, copies)
    assert dict(described.shard_shapes) == {name: tuple(shard.shape) for name, shard in expected[0].items()}


@given(servers(), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=40)
def test_layouts_plan_one_by_one_and_from_several_holders(server, partitions, ranks):
    """ZeRO-3 partitions beside surviving tensor-parallel shards of the same parameters."""
    model, tp_degree, vocab_multiple, copies = server
    full = parameters(model)
    expected = loaded(model, tp_degree, vocab_multiple, full)
    tensors = served(expected, copies)
    described = server_layout(model, tp_degree, vocab_multiple=vocab_multiple, locations=copies)
    targets = described.buffers(tensors)
    for name, tensor in full.items():
        flat, flat_buffers = hold(tensor, 'zero3', partitions)
        cut, cut_buffers = hold(tensor, 'tensor_parallel', ranks)
        source = union_affine_maps([flat, relabel(cut, {rank: partitions + rank for rank in range(ranks)})])
        buffers = {**flat_buffers, **{partitions + rank: part for rank, part in cut_buffers.items()}}
        apply_plan(plan_transfer(described.parts[name].target_map, source), buffers, targets[name])
    check_served(tensors, expected, copies)


def test_weights_are_cast_for_the_server():
    full = {name: tensor / 7 for name, tensor in parameters(SMALL, torch.float32).items()}
    expected = loaded(SMALL, 2, 4, {name: tensor.bfloat16() for name, tensor in full.items()})
    copies = [[0, 1], [2, 3]]
    tensors = served(expected, copies, torch.bfloat16)
    described = server_layout(SMALL, 2, vocab_multiple=4, locations=copies)
    source_maps, source_buffers = trainer(full, 'zero3', 3)
    transfers = described.transfers(source_maps, torch.float32, torch.bfloat16)
    plan = plan_transfers(transfers,
                          endpoints=TransferEndpoints(dict.fromkeys(range(3), 0), dict.fromkeys(range(4), 1)))
    for name, target in described.buffers(tensors).items():
        apply_plan(plan[name], source_buffers[name], target, target_dtype=torch.bfloat16)
    check_served(tensors, expected, copies)


def test_a_served_parameter_can_be_read_back():
    """The maps are exact on the views, so they are sources as well."""
    full = parameters(SMALL)
    expected = loaded(SMALL, 4, 8, full)
    described = server_layout(SMALL, 4, vocab_multiple=8)
    views = described.buffers({name: {rank: expected[rank][name] for rank in range(4)} for name in expected[0]})
    for name, part in described.parts.items():
        part.target_map.validate_coverage()
        assert torch.equal(part.target_map.rebuild(views[name]), full[name])


@pytest.mark.parametrize('tp_degree', [1, 2])
@pytest.mark.parametrize('table', TABLES)
def test_every_name_of_a_published_model_has_one_place(table, tp_degree):
    model, layer, outside, count = TABLES[table]
    expected = {
        f'model.layers.{index}.{name}': shape
        for index in range(model.num_hidden_layers)
        for name, shape in layer.items()
    } | outside
    described = server_layout(model, tp_degree)
    assert {name: part.target_map.logical_shape for name, part in described.parts.items()} == expected
    assert len(expected) == count

    rows = {name: [] for name in described.shard_shapes}
    for part in described.parts.values():
        for location, shape in part.target_map.shard_shapes.items():
            rows[part.parameter] += [(location, part.start + row) for row in range(shape[0])]
    for name, used in rows.items():
        # No vocabulary of these needs padding.
        assert sorted(used) == [(location, row) for location in range(tp_degree)
                                for row in range(described.shard_shapes[name][0])]


def test_a_published_model_is_planned_from_few_geometries():
    described = server_layout(LLAMA_3_8B, 8, locations=[range(8), range(8, 16)])
    maps = {shape: zero3_partition_map(shape, 16) for shape in set(parameter_shapes(LLAMA_3_8B).values())}
    transfers = described.transfers({
        name: maps[shape]
        for name, shape in parameter_shapes(LLAMA_3_8B).items()
    }, torch.bfloat16)
    endpoints = TransferEndpoints({rank: rank
                                   for rank in range(16)}, {location: 16 + location
                                                            for location in range(16)})
    plan = plan_transfers(transfers, endpoints=endpoints)
    assert len(plan.classes) <= 7
    norms = (2 * 32 + 1) * 4096
    total = 8_030_261_248
    assert sum(plan.received_bytes().values()) == 2 * 2 * (total + 7 * norms)


@pytest.mark.parametrize(
    'change, degree, message',
    [
        ({}, 3, r'tp_degree 3 does not divide num_attention_heads, 4'),
        (dict(intermediate_size=7), 2, r'tp_degree 2 does not divide intermediate_size, 7'),
        (dict(num_attention_heads=12, num_key_value_heads=6), 4, r'4 neither divides num_key_value_heads, 6'),
        (dict(num_attention_heads=12, num_key_value_heads=4, intermediate_size=6), 6, r'neither divides'),
        (dict(vocab_size=65, num_attention_heads=6,
              intermediate_size=6), 6, r'6 does not divide the 128 rows that a vocabulary of 65'),
        ({}, 0, r'tp_degree is 0'),
    ],
)
def test_degree_that_does_not_fit_is_refused(change, degree, message):
    with pytest.raises(ValueError, match=message):
        server_layout(replace(SMALL, **change), degree)


@pytest.mark.parametrize('locations, message', [
    ([], 'at least one copy'),
    ([[0, 1], [2]], r'locations\[1\] has 1 ids; expected 2'),
    ([[0, 1], [1, 2]], 'names 1 2 times'),
])
def test_locations_that_do_not_fit_are_refused(locations, message):
    with pytest.raises(ValueError, match=message):
        server_layout(SMALL, 2, locations=locations)


def test_vocabulary_multiple_below_one_is_refused():
    with pytest.raises(ValueError, match='vocab_multiple is 0; expected at least 1'):
        server_layout(SMALL, 2, vocab_multiple=0)


@pytest.mark.parametrize('change, error, message', [
    (dict(hidden_size=0), ValueError, 'hidden_size is 0; expected at least 1'),
    (dict(num_key_value_heads=3), ValueError, 'num_attention_heads is 4, no multiple of num_key_value_heads, 3'),
    (dict(vocab_size=2.5), TypeError, 'vocab_size must be an integer'),
    (dict(qkv_bias=1), TypeError, 'qkv_bias must be a bool, but it is 1'),
])
def test_description_that_is_none_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        replace(SMALL, **change)


def test_trainer_of_another_model_is_refused():
    described = server_layout(SMALL, 2)
    maps, _ = trainer(parameters(SMALL), 'zero3', 2)
    with pytest.raises(ValueError, match='needs lm_head.weight, but source_maps has no such name'):
        described.transfers({name: part for name, part in maps.items() if name != 'lm_head.weight'}, torch.float32)
    with pytest.raises(ValueError, match=r'has lm_head.weight, for which the server has no place.*leave out'):
        server_layout(replace(SMALL, tie_word_embeddings=True), 2).transfers(maps, torch.float32)


def test_tensors_of_another_server_are_refused():
    described = server_layout(SMALL, 2, vocab_multiple=4)
    tensors = {name: {1: tensor} for name, tensor in Loader(SMALL, 2, 4, 1).load(parameters(SMALL)).items()}
    name = 'model.layers.1.self_attn.qkv_proj.weight'
    with pytest.raises(ValueError, match=rf'{name} at location 1 has shape \(7, 3\); the server keeps \(8, 3\)'):
        described.buffers({**tensors, name: {1: torch.zeros(7, 3)}})
    with pytest.raises(ValueError, match=f'{name} is missing at location 1'):
        described.buffers({key: held for key, held in tensors.items() if key != name})
    with pytest.raises(ValueError, match="no parameter 'visual.weight'"):
        described.buffers({**tensors, 'visual.weight': {1: torch.zeros(1)}})
    with pytest.raises(ValueError, match=r'locations \[2\], which the layout does not have; it has \[0, 1\]'):
        described.buffers({key: {2: held[1]} for key, held in tensors.items()})


def test_process_that_serves_nothing_has_no_buffers():
    described = server_layout(SMALL, 2)
    assert described.buffers({}) == {name: {} for name in parameter_shapes(SMALL)}
