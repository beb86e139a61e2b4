# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where a tensor-parallel inference server keeps the parameters of a Llama or Qwen model.

The layout followed is vLLM's, for the dense models LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM, as its
layers and their weight loaders define it (``vllm/model_executor/layers/linear.py``, ``vocab_parallel_embedding.py``):

- ``QKVParallelLinear``: a shard of ``qkv_proj`` is the rank's query heads, its key heads, its value heads. With fewer
  key/value heads than ranks every rank holds one, and head h lies on the R = ranks / heads ranks from R * h on
  (``num_kv_head_replicas``);
- ``MergedColumnParallelLinear``: a shard of ``gate_up_proj`` is the rank's rows of the gate, then those of up;
- ``RowParallelLinear``: ``o_proj`` and ``down_proj`` are cut by columns;
- ``VocabParallelEmbedding``, ``ParallelLMHead``: rows are padded at the end to a multiple of 64 and cut evenly;
- norms are whole on every rank; a tied head is no parameter.

A fused server parameter is made of several Hugging Face parameters, each of which is a block of consecutive rows in
every shard. So the layout speaks of Hugging Face parameters: each has an ordinary target map, whose shards are those
rows alone, and its buffers are views of these rows in the server's tensors. Plans are therefore proved to fill the
rows, location ids need not differ between q, k and v, and padding, which is in no view, is never written.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields

from deepspeed.checkpoint.affine.algebra import relabel
from deepspeed.checkpoint.affine.checks import MAX_ELEMENTS, count, groups, listed, mapping, rank_count, shown
from deepspeed.checkpoint.affine.constructors import contiguous_split_map, replicated_map
from deepspeed.checkpoint.affine.param_map import ParamAffineMap
from deepspeed.checkpoint.affine.union import union_affine_maps
from deepspeed.checkpoint.affine.views import ReadOnlyMapping
from deepspeed.checkpoint.affine_transfer.parameter import ParameterTransfer

# Far more than any model has; every layer has names and maps of its own.
MOST_LAYERS = 2**16
EMBEDDING, HEAD = 'model.embed_tokens.weight', 'lm_head.weight'


@dataclass(frozen=True)
class DecoderModel:
    """The sizes of a Llama or Qwen model, under the names of its Hugging Face configuration.

    Args:
        hidden_size, intermediate_size, num_hidden_layers, vocab_size: as there.
        num_attention_heads, num_key_value_heads: the first a multiple of the second.
        head_dim: elements of a head; ``hidden_size // num_attention_heads`` where the configuration is silent.
        qkv_bias: q, k and v have a bias (Qwen2).
        qk_norm: there are norms of the query and key heads (Qwen3).
        tie_word_embeddings: the head is the embedding.

    Raises:
        TypeError: a size that is no integer, a switch that is no bool.
        ValueError: a size below 1, heads that are no multiple of the key/value heads.

    Example: Qwen2.5-0.5B::

        DecoderModel(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                     num_key_value_heads=2, head_dim=64, vocab_size=151936, qkv_bias=True, tie_word_embeddings=True)
    """
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False

    @classmethod
    def from_config(cls, config):
        """Read the sizes from a Hugging Face configuration, a dict as ``config.json`` has it.

        Raises:
            ValueError: a kind of model that is not laid out so, or a size that is missing.
        """
        kind = mapping(config, 'config').get('model_type')
        if kind not in ('llama', 'mistral', 'qwen2', 'qwen3') or kind != 'qwen2' and config.get('attention_bias'):
            raise ValueError(f'The configuration is of a model of type {shown(kind)}; llama, mistral, qwen2 and qwen3 '
                             'are known, without biases of their own (attention_bias).')
        required = [field.name for field in fields(cls) if field.type is int]
        derived = {
            'num_key_value_heads': config.get('num_attention_heads'),
            'head_dim': config.get('hidden_size', 0) // max(config.get('num_attention_heads', 1), 1)
        }
        sizes = {name: config.get(name) or derived.get(name) for name in required}
        missing = [name for name, size in sizes.items() if size is None]
        if missing:
            raise ValueError(f'The configuration has no {missing[0]}.')
        return cls(**sizes,
                   qkv_bias=kind == 'qwen2',
                   qk_norm=kind == 'qwen3',
                   tie_word_embeddings=bool(config.get('tie_word_embeddings')))

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool and type(value) is not bool:
                raise TypeError(f'{field.name} must be a bool, but it is {shown(value)}')
            if field.type is int and count(value, field.name) < 1:
                raise ValueError(f'{field.name} is {value}; expected at least 1')
        if self.num_hidden_layers > MOST_LAYERS:
            raise ValueError(f'num_hidden_layers is {self.num_hidden_layers}; expected at most {MOST_LAYERS}')
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f'num_attention_heads is {self.num_attention_heads}, no multiple of num_key_value_heads, '
                             f'{self.num_key_value_heads}; the query heads share them evenly')


@dataclass(frozen=True)
class ServerPart:
    """Where a Hugging Face parameter lies in the server.

    Attributes:
        parameter: the server parameter that it is in.
        start: its first row in every shard of that.
        target_map: the layout of its rows; a shard has these rows alone.
    """
    parameter: str
    start: int
    target_map: ParamAffineMap


@dataclass(frozen=True)
class ServerLayout:
    """Every parameter of a server, made by ``server_layout``.

    Attributes:
        shard_shapes: server parameter name -> shape of its tensor at every location, padding included.
        parts: Hugging Face parameter name -> ``ServerPart``.
    """
    shard_shapes: Mapping
    parts: Mapping

    def transfers(self, source_maps, source_dtype, target_dtype=None):
        """What ``plan_transfers`` takes, by Hugging Face name.

        Args:
            source_maps: Hugging Face parameter name -> ``ParamAffineMap`` of the trainer, for exactly the names of
                ``parts``: ``{name: trainer[name] for name in layout.parts}`` takes them out of more.
            source_dtype, target_dtype: of trainer and server. Default: both alike.

        Raises:
            TypeError: ``source_maps`` is no mapping.
            ValueError: a parameter that has no source map, or no place in the server.
        """
        missing = [name for name in self.parts if name not in mapping(source_maps, 'source_maps')]
        if missing:
            raise ValueError(f'The server needs {_some(missing)}, but source_maps has no such name. Check the '
                             'description of the model against the names of the trainer.')
        unknown = [name for name in source_maps if name not in self.parts]
        if unknown:
            raise ValueError(f'source_maps has {_some(unknown)}, for which the server has no place. Check the '
                             'description of the model, and leave out what it has not: a tied head, buffers.')
        return {
            name: ParameterTransfer(part.target_map, source_maps[name], source_dtype, target_dtype)
            for name, part in self.parts.items()
        }

    def buffers(self, tensors):
        """The target buffers of each Hugging Face parameter: views of its rows in the server's tensors.

        Args:
            tensors: server parameter name -> ``{location: tensor}`` with the locations of this process; the tensors
                have the shapes of ``shard_shapes``. ``{}`` on a process that serves nothing.

        Returns:
            Hugging Face parameter name -> ``{location: tensor}``, for all names of ``parts``.

        Raises:
            TypeError: ``tensors``, or what it has for a name, is no mapping.
            ValueError: a name or a location that the layout does not have, a tensor that is missing at a location
                which has others, a tensor of another shape.
        """
        here = self._checked_locations(tensors)
        views = {}
        for name, part in self.parts.items():
            shards = part.target_map.shard_shapes
            held = tensors.get(part.parameter, {})
            views[name] = {
                location: held[location].detach().narrow(0, part.start, shards[location][0])
                for location in here
            }
        return views

    def _checked_locations(self, tensors):
        """The locations of this process, ascending."""
        for name, held in mapping(tensors, 'tensors').items():
            mapping(held, f'tensors[{shown(name)}]')
            if name not in self.shard_shapes:
                raise ValueError(f'The server has no parameter {shown(name)}; it has {_some(self.shard_shapes)}.')
        here = {location for held in tensors.values() for location in held}
        known = self.parts[EMBEDDING].target_map.shard_shapes
        if not here <= known.keys():
            raise ValueError(f'tensors has the locations {listed(sorted(here - known.keys()))}, which the layout '
                             f'does not have; it has {listed(sorted(known))}.')
        for name, shape in self.shard_shapes.items():
            for location in here:
                tensor = tensors.get(name, {}).get(location)
                if tensor is None:
                    raise ValueError(f'{name} is missing at location {location}, which has other parameters.')
                if tuple(tensor.shape) != shape:
                    raise ValueError(f'{name} at location {location} has shape {tuple(tensor.shape)}; '
                                     f'the server keeps {shape} there.')
        return sorted(here)


def server_layout(model, tp_degree, *, vocab_multiple=64, locations=None):
    """Describe the parameters of a server, of one or several copies of it.

    Args:
        model: ``DecoderModel``.
        tp_degree: ranks of each copy.
        vocab_multiple: the rows of embedding and head are padded to a multiple of this.
        locations: for each copy of the server the location ids of its ranks. Default: one copy, 0 to tp_degree - 1.

    Returns:
        ``ServerLayout``.

    Raises:
        TypeError: a model that is no ``DecoderModel``; a degree, multiple or location that is no integer.
        ValueError: a tensor-parallel degree that does not divide the heads, the intermediate size or the padded
            vocabulary; key/value heads that neither divide it nor are divided by it; a location that comes twice.

    Example, run on every process of a ZeRO-3 trainer of W ranks and of two servers; ``sources`` is what a trainer's
    process holds, ``served`` what a server's does, ``{}`` elsewhere::

        layout = server_layout(model, 2, locations=[[0, 1], [2, 3]])
        source_maps = {name: zero3_partition_map(part.target_map.logical_shape, W)
                       for name, part in layout.parts.items()}
        plan = plan_transfers(layout.transfers(source_maps, torch.float32, torch.bfloat16), endpoints=endpoints)
        targets = layout.buffers(served)
        execute_transfers([TransferRequest(plan[name], sources.get(name, {}), targets[name], name=name)
                           for name in plan], endpoints, torch.float32, group=group, target_dtype=torch.bfloat16)
    """
    if not isinstance(model, DecoderModel):
        raise TypeError(f'model must be a DecoderModel, but it is {shown(model)}')
    ranks = rank_count(tp_degree, 'tp_degree', least=1)
    _check_divisible(model, ranks)
    rows = _vocabulary_rows(model.vocab_size, vocab_multiple, ranks)
    copies = _checked_copies(locations, ranks)
    shapes, parts = {}, {}
    for server, maps in _server_maps(model, copies, rows).items():
        start = 0
        for name, target_map in maps.items():
            parts[name] = ServerPart(server, start, target_map)
            # Of fused parameters all ranks have equally many rows.
            shard = target_map.shard_shapes[copies[0][0]]
            start += shard[0]
        shapes[server] = (rows if server in (EMBEDDING, HEAD) else start, *shard[1:])
    return ServerLayout(ReadOnlyMapping(shapes), ReadOnlyMapping(parts))


def _server_maps(model, copies, rows):
    """``{Hugging Face name: target map}`` of each server parameter, in the order of their rows in it."""
    held = [min(max(model.vocab_size - rank * rows, 0), rows) for rank in range(len(copies[0]))]
    vocabulary = _cut((model.vocab_size, model.hidden_size), 0, held, copies)
    alone = {EMBEDDING: vocabulary, 'model.norm.weight': _whole((model.hidden_size, ), copies)}
    if not model.tie_word_embeddings:
        alone[HEAD] = vocabulary
    maps = {name: {name: target_map} for name, target_map in alone.items()}
    # The layers share their maps: a planner looks at each distinct geometry once.
    layer = _layer_maps(model, copies)
    for index in range(model.num_hidden_layers):
        prefix = f'model.layers.{index}.'
        for server, made_of in layer.items():
            maps[prefix + server] = {prefix + name: target_map for name, target_map in made_of.items()}
    return maps


def _layer_maps(model, copies):
    """As ``_server_maps``, of one layer, by the names within it."""
    ranks = len(copies[0])
    hidden, queries = model.hidden_size, model.num_attention_heads * model.head_dim
    norm = _whole((hidden, ), copies)
    alone = {
        'input_layernorm.weight': norm,
        'post_attention_layernorm.weight': norm,
        'self_attn.o_proj.weight': _even((hidden, queries), 1, ranks, copies),
        'mlp.down_proj.weight': _even((hidden, model.intermediate_size), 1, ranks, copies),
    }
    if model.qk_norm:
        head_norm = _whole((model.head_dim, ), copies)
        alone.update({'self_attn.q_norm.weight': head_norm, 'self_attn.k_norm.weight': head_norm})
    maps = {name: {name: target_map} for name, target_map in alone.items()}
    maps['self_attn.qkv_proj.weight'] = _qkv_maps(model, 'weight', (hidden, ), copies)
    if model.qkv_bias:
        maps['self_attn.qkv_proj.bias'] = _qkv_maps(model, 'bias', (), copies)
    gated = _even((model.intermediate_size, hidden), 0, ranks, copies)
    maps['mlp.gate_up_proj.weight'] = {'mlp.gate_proj.weight': gated, 'mlp.up_proj.weight': gated}
    return maps


def _qkv_maps(model, kind, columns, copies):
    """q, k and v of one layer; ``columns``: the shape of a row."""
    ranks = len(copies[0])
    queries = _even((model.num_attention_heads * model.head_dim, *columns), 0, ranks, copies)
    parts = min(ranks, model.num_key_value_heads)
    holders = ranks // parts
    # Each part is on `holders` neighbouring ranks: as many layouts of the same parameter, side by side.
    spread = [ids[first::holders] for ids in copies for first in range(holders)]
    keys = _even((model.num_key_value_heads * model.head_dim, *columns), 0, parts, spread)
    return {f'self_attn.{part}_proj.{kind}': rows for part, rows in (('q', queries), ('k', keys), ('v', keys))}


def _whole(shape, copies):
    ids = [location for copy in copies for location in copy]
    return relabel(replicated_map(shape, len(ids)), dict(enumerate(ids)))


def _even(shape, dim, parts, copies):
    return _cut(shape, dim, [shape[dim] // parts] * parts, copies)


def _cut(shape, dim, widths, copies):
    """The parameter cut along an axis, once for each of ``copies``, which name the locations of the parts."""
    once = contiguous_split_map(shape, widths, dim)
    return union_affine_maps([relabel(once, dict(enumerate(ids))) for ids in copies])


def _check_divisible(model, ranks):
    for name in ('num_attention_heads', 'intermediate_size'):
        if getattr(model, name) % ranks:
            raise ValueError(f'tp_degree {ranks} does not divide {name}, {getattr(model, name)}: this layout gives '
                             'every rank equally much. Use a degree that divides it.')
    heads = model.num_key_value_heads
    if heads % ranks and ranks % heads:
        raise ValueError(f'tp_degree {ranks} neither divides num_key_value_heads, {heads}, nor is a multiple of it: '
                         'every rank holds whole heads, and every head lies on equally many ranks.')


def _vocabulary_rows(vocab_size, multiple, ranks):
    """Rows of embedding and head in each shard, padding included."""
    multiple = count(multiple, 'vocab_multiple')
    if multiple < 1:
        raise ValueError(f'vocab_multiple is {multiple}; expected at least 1, which stands for no padding')
    padded = -(-vocab_size // multiple) * multiple
    if padded > MAX_ELEMENTS:
        raise ValueError(f'vocab_size {vocab_size} padded to a multiple of {multiple} is beyond 2**62')
    if padded % ranks:
        raise ValueError(f'tp_degree {ranks} does not divide the {padded} rows that a vocabulary of {vocab_size} has '
                         f'when it is padded to a multiple of {multiple}: every rank holds equally many. Pad to a '
                         f'multiple that {ranks} divides.')
    return padded // ranks


def _checked_copies(locations, ranks):
    """For each copy of the server the location ids of its ranks."""
    if locations is None:
        return (tuple(range(ranks)), )
    copies = groups(locations, 'locations')
    if not copies:
        raise ValueError('locations is empty; name the locations of at least one copy of the server')
    for index, ids in enumerate(copies):
        if len(ids) != ranks:
            raise ValueError(f'locations[{index}] has {len(ids)} ids; expected {ranks}, one for each rank')
    everywhere = Counter(location for ids in copies for location in ids)
    location, uses = everywhere.most_common(1)[0]
    if uses > 1:
        raise ValueError(f'locations names {location} {uses} times, but a location is one buffer')
    return copies


def _some(names):
    """A few names for a message."""
    names = list(names)
    return ', '.join(names[:3]) + (f' and {len(names) - 3} more' if len(names) > 3 else '')
