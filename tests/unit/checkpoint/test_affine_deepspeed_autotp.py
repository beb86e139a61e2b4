# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps that the layers of real AutoTP engines publish, and maps that the adapter makes of live engines."""

import re

import pytest
import torch

import affine_autotp_processes as ranks
from affine_rank_host import RankHost
from affine_shard_rules import whole_parameter
from deepspeed.checkpoint.affine import ParamAffineMap
from deepspeed.checkpoint.affine.envelope import load_affine_maps

KINDS = ("llama", "tied", "fused", "opt", "mpt", "bigcode")
LISTS = ("parameter_with_row_parallelism_patterns", "tp_replicated_parameter_patterns",
         "vocabulary_parameter_patterns")


@pytest.fixture(scope="module")
def host():
    with RankHost() as host:
        yield host


@pytest.fixture(scope="module")
def host_without_us():
    with RankHost(hide_our_packages=True) as host:
        yield host


@pytest.fixture(scope="module", params=KINDS)
def answers(request, host):
    return host.run(2, ranks.publish, request.param)


@pytest.fixture(scope="module", params=ranks.LAYERS)
def layer_answers(request, host):
    return host.run(2, ranks.publish_layers, request.param)


def _published_maps(answer):
    """Maps by parameter name; a pattern is the exact name."""
    maps = load_affine_maps(answer["published"]["affine_map"])
    by_name = {name: [maps[pattern] for pattern in maps if re.match(pattern, name)] for name in answer["shards"]}
    assert sum(map(len, by_name.values())) == len(maps)
    return {name: found for name, found in by_name.items() if found}


def _listed_patterns(published):
    patterns = set().union(*(published[name] for name in LISTS))
    return patterns.union(*(entry["patterns"] for entry in published["parameter_with_sub_params"]))


# ------------------------------------------------------------------------------------------ what layers publish


def test_maps_are_of_our_class(answers):
    assert [answer["class"] for answer in answers] == ["deepspeed.checkpoint.affine.param_map"] * 2


def test_every_parameter_has_one_map(answers):
    """Those in the pattern lists, and those which the lists leave to the default; there is no map of anything else."""
    for answer in answers:
        assert answer["published"]["autotp_unsupported_parameter_patterns"] == {}
        maps = _published_maps(answer)
        assert set(maps) == set(answer["shards"])
        assert {len(found) for found in maps.values()} == {1}
        assert _listed_patterns(answer["published"]) <= set(answer["published"]["affine_map"]["params"])
    assert answers[0]["published"] == answers[1]["published"]


def test_maps_put_the_shards_together(answers):
    for name, (affine_map, ) in _published_maps(answers[0]).items():
        shards = {rank: answer["shards"][name] for rank, answer in enumerate(answers)}
        whole = answers[0]["whole"][name]
        assert affine_map.numel == whole.numel()
        assert torch.equal(affine_map.rebuild(shards).reshape(whole.shape), whole), name
        for rank, shard in shards.items():
            assert torch.equal(affine_map.extract(whole, rank).reshape(shard.shape), shard), name


def test_parameters_that_no_layer_cut_are_replicated(answers):
    maps = _published_maps(answers[0])
    uncut = [name for name, shard in answers[0]["shards"].items() if shard.shape == answers[0]["whole"][name].shape]
    norms = [name for name in uncut if "norm" in name or "ln_" in name]
    assert norms
    for name in norms:
        affine_map, = maps[name]
        assert set(affine_map.shard_shapes) == {0, 1}
        assert all(piece.locations == {0, 1} for pieces in affine_map.pieces_by_rank.values() for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_deepspeeds_own_module_publishes_the_same(kind, host, host_without_us):
    theirs = host_without_us.run(2, ranks.publish, kind)
    assert theirs[0]["class"] == "deepspeed.checkpoint.affine"
    ours = host.run(2, ranks.publish, kind)
    # repr: the numbers are plain ints on both sides.
    assert repr(ours[0]["published"]) == repr(theirs[0]["published"])


def test_layers_that_state_a_map_are_published_and_no_others(layer_answers):
    """A parameter is in the maps or among the unsupported, and only the unsupported states no map."""
    for answer in layer_answers:
        unsupported = {
            name
            for pattern in answer["published"]["autotp_unsupported_parameter_patterns"]
            for name in answer["shards"] if re.match(pattern, name)
        }
        assert unsupported == {name for name, stated in answer["states a map"].items() if not stated}
        described = set(_published_maps(answer)) if "affine_map" in answer["published"] else set()
        assert described == set(answer["shards"]) - unsupported


def test_maps_put_shards_of_such_layers_together(layer_answers):
    if not all(layer_answers[0]["states a map"].values()):
        assert isinstance(layer_answers[0]["adapter"], str)
        return
    for name, (affine_map, ) in _published_maps(layer_answers[0]).items():
        shards = {rank: answer["shards"][name] for rank, answer in enumerate(layer_answers)}
        whole = layer_answers[0]["whole"][name]
        assert torch.equal(affine_map.rebuild(shards).reshape(whole.shape), whole)
        # The adapter describes the parameter in its own shape, in whichever the layer sees it.
        layouts = [answer["adapter"][name][0] for answer in layer_answers]
        buffers = {rank: answer["adapter"][name][1][rank] for rank, answer in enumerate(layer_answers)}
        assert layouts[0] == layouts[1]
        assert torch.equal(ParamAffineMap.from_dict(layouts[0]).rebuild(buffers), whole)


@pytest.mark.parametrize("kind", ranks.LAYERS)
def test_unsupported_layouts(host, kind):
    for answer in host.run(2, ranks.publish_layers, kind):
        if "odd heads" not in kind:
            assert all(answer["states a map"].values()) and set(answer["adapter"]) == set(answer["shards"])
            continue
        assert answer["states a map"] == {"layer.weight": False, "layer.bias": False}
        assert "'layer.weight' does not describe how it cut it: Yuan shared-QK" in answer["adapter"]
        # Where nothing is described there is no key, not an empty one.
        assert ("affine_map" in answer["published"]) == ("norm" in kind)
        if "norm" in kind:
            assert set(_published_maps(answer)) == {"norm.weight", "norm.bias"}


# ------------------------------------------------------------------------------------------ maps of live engines

LIVE = {
    # name: model, tp, ZeRO stage, key and value heads, groups; the rest of the ranks is data-parallel
    "tp2": (2, "fused", 2, 1, 4, None),
    "uneven vocabulary, empty shards": (4, "llama", 4, 1, 2, None),
    "two copies": (4, "llama", 2, 1, 4, [[0, 1], [2, 3]]),
    "zero3, fused": (4, "fused", 2, 3, 4, None),
    "zero3, uneven vocabulary": (4, "llama", 2, 3, 4, [[0, 1], [2, 3]]),
    "zero3, tied": (4, "tied", 2, 3, 4, None),
}


@pytest.fixture(scope="module", params=LIVE)
def live(request, host):
    world_size, *arguments = LIVE[request.param]
    return request.param, host.run(world_size, ranks.describe, *arguments)


def test_live_maps_are_the_same_on_every_rank_that_they_name(live):
    _, answers = live
    for name, (layout, _, tied_to) in answers[0]["held"].items():
        for rank in ParamAffineMap.from_dict(layout).shard_shapes:
            assert answers[rank]["held"][name][0] == layout
            assert answers[rank]["held"][name][2] == tied_to


def test_live_maps_and_buffers_are_the_model(live):
    """Buffers of all ranks were taken before a step; the shards that the engine holds after it are put together."""
    case, answers = live
    _, _, tp, _, kv_heads, _ = LIVE[case]
    copies = range(0, len(answers), len(_layout(answers[0], next(iter(answers[0]["held"]))).shard_shapes))
    for first in copies:
        for name in answers[first]["held"]:
            layout = _layout(answers[first], name)
            layout.validate()
            layout.validate_coverage()
            buffers = {}
            for rank in layout.shard_shapes:
                buffers.update(answers[rank]["held"][name][1])
            whole = whole_parameter(name, [answers[first + place]["shards"][name] for place in range(tp)], kv_heads)
            assert layout.logical_shape == whole.shape
            assert {location: tuple(buffer.shape) for location, buffer in buffers.items()} == layout.shard_shapes
            assert torch.equal(layout.rebuild(buffers), whole), name


def _layout(answer, name):
    return ParamAffineMap.from_dict(answer["held"][name][0])


@pytest.mark.parametrize("case", ["two copies", "zero3, tied"])
def test_locations_are_global_ranks(host, case):
    world_size, *arguments = LIVE[case]
    answers = host.run(world_size, ranks.describe, *arguments)
    for rank, answer in enumerate(answers):
        for layout, buffers, _ in answer["held"].values():
            assert list(buffers) == [rank] and sorted(layout["ranks"]) == list(range(world_size))
        for layout, same in answer["buffers"].values():
            assert same and sorted(layout["ranks"]) == list(range(world_size))


def test_copies_name_each_other(host):
    world_size, *arguments = LIVE["two copies"]
    answer = host.run(world_size, ranks.describe, *arguments)[0]
    holders = {
        name: {frozenset(piece.locations)
               for piece in _layout(answer, name).pieces_by_rank[0]}
        for name in answer["held"]
    }
    assert holders["lm_head.weight"] == {frozenset({0, 2})}
    assert holders["model.norm.weight"] == {frozenset({0, 1, 2, 3})}


def test_tied_names_are_one_parameter(host):
    world_size, *arguments = LIVE["zero3, tied"]
    held = host.run(world_size, ranks.describe, *arguments)[1]["held"]
    assert held["lm_head.weight"][2] == "model.embed_tokens.weight"
    assert held["lm_head.weight"][0] == held["model.embed_tokens.weight"][0]
    assert [name for name, (_, _, tied_to) in held.items() if tied_to] == ["lm_head.weight"]


def test_refusals(host):
    for messages in host.run(4, ranks.refuse):
        assert "but replica_groups are [[0, 2], [1, 3]]" in messages["other groups"]
        assert "cuts this shard over the ranks" in messages["groups in another order"]
        assert "has no AutoTP layer" in messages["no layers"]
        assert "'lm_head.weight' does not describe how it cut it: it carries no affine map" in messages["no map"]
        assert "'weight' has shape (32, 8)" in messages["another cut"]
        assert "it was cut in another way than its layer states" in messages["another cut"]
