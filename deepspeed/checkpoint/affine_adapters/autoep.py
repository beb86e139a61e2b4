# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of the expert weights of an AutoEP model, from where its layers say that the experts are.

DeepSpeed 0.19.8's ``deepspeed/module_inject/auto_ep_layer.py`` keeps the experts of a layer in parameters of shape
``(local experts, ...)`` and puts a placement on each: which experts every expert-parallel rank has, in the order in
which it has them. ``deepspeed/checkpoint/autoep_affine.py`` says what a placement is.
"""

from deepspeed.checkpoint.affine.checks import integer, integers, listed, mapping, rank_count, shown, sizes
from deepspeed.checkpoint.affine.constructors import block_gather_map
from deepspeed.checkpoint.affine.union import union_affine_maps
from deepspeed.checkpoint.affine_adapters.held import describe_each, module_of
from deepspeed.checkpoint.affine_adapters.shard_groups import held_in_groups, shard_groups

_PLACEMENT_VERSION = 1
_EXPERT_METADATA = 'ds_autoep_uc_meta'


def autoep_maps(engine_or_module, *, expert_parallel_groups=None):
    """Describe the expert weights of a model that AutoEP has placed, and hand out this process' part of them.

    All other parameters are left out: they are held as in any model. Under ZeRO-3 the layout says how each rank's
    experts are cut again over the ranks that have the same ones, and the buffers are the engine's own partitions
    without padding. Buffers are views: they may be taken once and read after every optimizer step.

    A location is the global rank that holds the part.

    Args:
        engine_or_module: what ``deepspeed.initialize`` returned, or the module within it.
        expert_parallel_groups: global ranks of all expert-parallel groups, one sequence for each in the order of the
            placement's ranks. Default: under ZeRO-3 the groups that DeepSpeed makes, one for each rank that this
            process' experts are cut over; otherwise this process' group alone, because a process does not know of the
            other copies.

    Returns:
        ``{name: HeldParameter}``, logical shapes ``(experts, ...)``.

    Raises:
        TypeError: as for ``autoep_placement_map``.
        ValueError: no AutoEP layer, or one that ``deepspeed.initialize`` has not given its group; a placement that is
            none, or that disagrees with what this rank holds; groups that are not those of the model.

    Example, for a whole model::

        held = {**zero3_maps(engine), **autoep_maps(engine)}
    """
    module = module_of(engine_or_module)
    group_of = {
        id(param): _group(name, layer)
        for name, layer in module.named_modules() if hasattr(layer, 'ep_group') for param in layer.parameters()
    }
    named = [(name, param) for name, param in module.named_parameters(remove_duplicate=False)
             if hasattr(param, _EXPERT_METADATA)]
    if not named:
        raise ValueError('The module has no AutoEP layer. Pass the engine that deepspeed.initialize made with '
                         'expert_parallel enabled, or its module.')
    placed, layouts = {}, {}

    def describe(name, param):
        what = f'Parameter {name!r}'
        metadata = getattr(param, _EXPERT_METADATA)
        groups = shard_groups(group_of[id(param)], expert_parallel_groups, getattr(param, 'ds_process_group', None),
                              what)
        shards = _placed(metadata['expert_placement'], tuple(metadata['logical_shape']), placed)
        if len(shards.shard_shapes) != len(groups.ranks):
            raise ValueError(f'{what} is placed on {len(shards.shard_shapes)} ranks, but its expert-parallel group is '
                             f'{list(groups.ranks)}.')
        return held_in_groups(param, shards, groups, layouts, what)

    return describe_each(named, id, describe)


def autoep_placement_map(placement, logical_shape):
    """Return the map of an expert weight under an AutoEP placement.

    Ranks may hold any experts in any order, different numbers of them or none, and one expert may be held by several.

    Args:
        placement: the placement as AutoEP stores it: ``{'version': 1, 'num_experts': E, 'ep_size': T,
            'ranks': [{'rank': 0, 'experts': [...]}, ...]}``.
        logical_shape: shape of the weights of all experts, ``(E, ...)``.

    Returns:
        ``ParamAffineMap`` in canonical form; its locations are the placement's ranks.

    Raises:
        TypeError: a placement that is no mapping; numbers, ranks or experts that are no integers.
        ValueError: a placement of another version or that contradicts itself, an expert that no rank holds, a shape
            that does not begin with the number of experts.

    Example: three experts, the last of which both ranks hold::

        >>> layout = autoep_placement_map({'version': 1, 'num_experts': 3, 'ep_size': 2,
        ...                                'ranks': [{'rank': 0, 'experts': [0, 2]},
        ...                                          {'rank': 1, 'experts': [2, 1]}]}, (3, 8))
        >>> [sorted(piece.locations) for piece in layout.pieces_by_rank[1]]
        [[0, 1], [1]]
    """
    return _placed(placement, logical_shape, {})


def _placed(placement, logical_shape, placed):
    """``autoep_placement_map``, made once for each placement and shape and kept in the dict ``placed``."""
    shape = sizes(logical_shape, 'logical_shape')
    experts = _experts_by_rank(mapping(placement, 'placement'))
    count = placement['num_experts']
    if not shape or shape[0] != count:
        raise ValueError(f'The weights of {count} experts have a shape that begins with {count}, but logical_shape is '
                         f'{shape}.')
    # Every layer has a placement of its own, and mostly they are equal.
    key = tuple(experts.items()), shape
    if key not in placed:
        # Each rank by itself says which experts it has; together they say who else has them.
        placed[key] = union_affine_maps([block_gather_map(shape, {rank: ids}, 1, 0) for rank, ids in experts.items()])
    return placed[key]


def _experts_by_rank(placement):
    if placement.get('version') != _PLACEMENT_VERSION:
        raise ValueError(f'The placement has version {placement.get("version")!r}, but only {_PLACEMENT_VERSION} is '
                         'known; upgrade deepspeed-affine.')
    count = rank_count(placement.get('num_experts'), 'num_experts of the placement')
    ranks = rank_count(placement.get('ep_size'), 'ep_size of the placement')
    experts, entries = {}, placement.get('ranks')
    if not isinstance(entries, (list, tuple)):
        raise TypeError(f'ranks of the placement must be a list, but it is {shown(entries)}.')
    for index, entry in enumerate(entries):
        rank = integer(mapping(entry, f'ranks[{index}] of the placement').get('rank'), 'a rank of the placement')
        ids = integers(entry.get('experts'), f'the experts of rank {rank}')
        if rank in experts:
            raise ValueError(f'The placement lists rank {rank} twice.')
        if len(set(ids)) != len(ids) or any(not 0 <= expert < count for expert in ids):
            raise ValueError(f'Rank {rank} of the placement has the experts {list(ids)}; they must be different ones '
                             f'of 0 to {count - 1}.')
        experts[rank] = ids
    if len(experts) != ranks or sorted(experts) != list(range(ranks)):
        raise ValueError(f'The placement lists the ranks {listed(sorted(experts))}; with ep_size {ranks} they must be '
                         '0 to ep_size - 1.')
    missing = sorted(set(range(count)).difference(*experts.values()))
    if missing:
        raise ValueError(f'No rank of the placement holds the experts {listed(missing)}.')
    return experts


def _group(name, layer):
    if layer.ep_group is None:
        raise ValueError(f'The AutoEP layer {name!r} has no expert-parallel group yet; pass a model that '
                         'deepspeed.initialize has returned.')
    return layer.ep_group
