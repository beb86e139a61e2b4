# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Experts of real AutoEP training: maps of live engines, and checkpoints that move between placements."""

import functools
import itertools
import json

import pytest
import torch

import affine_autoep_processes as ranks
from affine_converted_files import assert_same_files, converted
from affine_rank_host import RankHost
from affine_universal_processes import STATES, convert
from deepspeed.checkpoint.affine import ParamAffineMap
from deepspeed.checkpoint.affine_adapters.autoep import autoep_placement_map

WORLD_SIZE, EP_SIZE = 4, 2


@pytest.fixture(scope="module")
def host():
    with RankHost() as host:
        yield host


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(host, folder):
    """A function from a ZeRO stage to the training that went on, made and converted once."""

    @functools.lru_cache
    def save_and_convert(stage):
        trained = host.run(WORLD_SIZE, ranks.train, EP_SIZE, stage, folder, f"stage{stage}")
        host.run(1, convert, folder, f"stage{stage}", {})
        return trained

    return save_and_convert


def _whole(answers, name, ep_size):
    """Whole expert weights, put together by hand; other expert-parallel groups have the same."""
    first, *others = [
        torch.cat([answer["experts"][name] for answer in answers[start:start + ep_size]])
        for start in range(0, len(answers), ep_size)
    ]
    assert all(torch.equal(other, first) for other in others)
    return first


# ------------------------------------------------------------------------------------------ live engines


@pytest.fixture(scope="module",
                params=[(1, None), (1, [[0, 1], [2, 3]]), (3, None), (3, [[0, 1], [2, 3]])],
                ids=["zero1", "zero1, both groups", "zero3", "zero3, both groups"])
def live(request, host):
    stage, groups = request.param
    return stage, groups, host.run(WORLD_SIZE, ranks.describe, EP_SIZE, stage, groups)


def test_live_maps_and_buffers_are_the_experts(live):
    """Buffers of all ranks were taken before a step, the experts after it."""
    stage, groups, answers = live
    everywhere = groups is not None or stage == 3
    for first in [0] if everywhere else [0, 2]:
        assert set(answers[first]["held"]) == set(ranks.NAMES)
        for name, (layout, _) in answers[first]["held"].items():
            layout = ParamAffineMap.from_dict(layout)
            assert sorted(layout.shard_shapes) == [0, 1, 2, 3] if everywhere else [first, first + 1]
            layout.validate()
            layout.validate_coverage()
            buffers = {}
            for rank in layout.shard_shapes:
                assert answers[rank]["held"][name][0] == layout.to_dict()
                buffers.update(answers[rank]["held"][name][1])
            assert {location: tuple(buffer.shape) for location, buffer in buffers.items()} == layout.shard_shapes
            assert torch.equal(layout.rebuild(buffers), _whole(answers, name, EP_SIZE)), name


def test_copies_name_each_other(live):
    stage, groups, answers = live
    layout = ParamAffineMap.from_dict(answers[0]["held"][ranks.NAMES[0]][0])
    holders = {tuple(sorted(piece.locations)) for pieces in layout.pieces_by_rank.values() for piece in pieces}
    if stage == 3:
        assert holders == {(0, ), (1, ), (2, ), (3, )}
    else:
        assert holders == ({(0, ), (1, )} if groups is None else {(0, 2), (1, 3)})


def test_layers_state_the_same_placement(live):
    """DeepSpeed's own lowering of the placement, on our classes, has the same elements in the same places."""
    _, _, answers = live
    for rank, answer in enumerate(answers):
        for name, stated in answer["stated"].items():
            stated = ParamAffineMap.from_dict(stated)
            whole = _whole(answers, name, EP_SIZE)
            assert torch.equal(stated.extract(whole, rank % EP_SIZE), answer["experts"][name])


def test_refusals(live):
    for answer in live[2]:
        assert "has no AutoEP layer" in answer["messages"]["no layers"]
        assert "but replica_groups are [[0, 3], [1, 2]]" in answer["messages"]["other groups"]
        assert f"{ranks.NAMES[0]!r} has shape (2, 16, 32)" in answer["messages"]["other placement"]


# ------------------------------------------------------------------------------------------ save, convert, resume

MATRIX = [(stage, ep_size) for stage in (1, 2, 3) for ep_size in (1, 2, 4)]


@pytest.mark.parametrize(
    "stage, ep_size",
    [pytest.param(*case, marks=() if case in ((1, 4), (3, 2)) else pytest.mark.slow) for case in MATRIX])
def test_resumes_where_training_was(host, folder, saved, stage, ep_size):
    trained = saved(stage)
    for name in ranks.NAMES:
        assert torch.equal(converted(folder / f"stage{stage}_universal", name, "fp32"), _whole(trained, name, EP_SIZE))
    again = f"stage{stage} again {ep_size}"
    resumed = host.run(WORLD_SIZE, ranks.resume, ep_size, stage, folder, f"stage{stage}_universal", again)
    for name in ranks.NAMES:
        assert torch.equal(_whole(resumed, name, ep_size), _whole(trained, name, EP_SIZE))
    # What was restored is saved at once and converted from its own placement: weights, moments and counters.
    host.run(1, convert, folder, again, {})
    assert_same_files(folder / f"stage{stage}_universal", folder / f"{again}_universal")
    for before, after in zip(trained, resumed):
        for expected, loss in zip(before["losses"][ranks.SAVE_AT:], after["losses"]):
            # With other experts on a rank its products are of other sizes, which are added up in another order.
            assert torch.equal(loss, expected) if ep_size == EP_SIZE else torch.isclose(loss, expected)


# ------------------------------------------------------------------------------------------ any placement
# The layers of 0.19.8 place experts evenly. Its descriptors, its converter and its restore take any placement.

PLACEMENTS = {
    "uneven": [[0, 1, 2, 3], [4], [5]],
    "scattered": [[5, 0, 3], [1], [4, 2]],
    "replicated": [[0, 1, 2], [2, 3, 1], [1, 5, 4]],
    "one empty rank": [[3, 2, 1, 0], [], [4, 5]],
    "everything everywhere": [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]],
}
SHAPE = (6, 3, 2)
FULL = torch.arange(36.).reshape(SHAPE)


def _descriptor(placement):
    from deepspeed.checkpoint.autoep_affine import make_autoep_placement_descriptor
    return make_autoep_placement_descriptor(6, PLACEMENTS[placement])


def _shards(placement):
    """The experts of each rank in its order, by indexing."""
    return {rank: FULL[experts] for rank, experts in enumerate(PLACEMENTS[placement])}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_our_map_of_a_placement(placement):
    layout = autoep_placement_map(_descriptor(placement), SHAPE)
    layout.validate()
    layout.validate_coverage()
    for rank, shard in _shards(placement).items():
        assert torch.equal(layout.extract(FULL, rank), shard)
        for piece in layout.pieces_by_rank[rank]:
            for expert in range(piece.source_offset // 6, (piece.source_offset + piece.numel) // 6):
                holders = {other for other, experts in enumerate(PLACEMENTS[placement]) if expert in experts}
                assert piece.locations == holders
    assert torch.equal(layout.rebuild(_shards(placement)), FULL)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_deepspeeds_map_of_a_placement_is_ours_and_the_same_layout(placement):
    from deepspeed.checkpoint.autoep_affine import autoep_metadata_to_affine_map, autoep_placement_to_affine_map
    theirs = autoep_placement_to_affine_map(_descriptor(placement), SHAPE)
    assert type(theirs) is ParamAffineMap
    assert theirs.shard_shapes == autoep_placement_map(_descriptor(placement), SHAPE).shard_shapes
    assert theirs.holders() == autoep_placement_map(_descriptor(placement), SHAPE).holders()
    # Read back from a file it must be what the placement gives, piece for piece: DeepSpeed compares the two.
    metadata = {"expert_placement": _descriptor(placement), "affine_map": json_copy(theirs.to_dict())}
    assert autoep_metadata_to_affine_map(metadata, SHAPE).to_dict() == theirs.to_dict()


def json_copy(stored):
    return json.loads(json.dumps(stored))


@pytest.mark.parametrize("source", PLACEMENTS)
@pytest.mark.parametrize("target", PLACEMENTS)
def test_experts_move_between_any_placements(tmp_path, source, target):
    """DeepSpeed's converter from checkpoint files, then its restore into a parameter."""
    _convert_placed_experts(tmp_path, source)
    for weight, state in itertools.product(ranks.WEIGHTS, STATES):
        content = torch.load(tmp_path / "zero" / f"experts.{weight}" / f"{state}.pt", weights_only=False)
        assert torch.equal(content["param"], _state(FULL, weight, state))
        for rank, shard in _shards(target).items():
            restored = _restore(content, target, rank)
            assert torch.equal(restored, _state(shard, weight, state)) and restored.shape == shard.shape


def _state(tensor, weight, state):
    return tensor + 100. * STATES.index(state) + 1000. * ranks.WEIGHTS.index(weight)


def _convert_placed_experts(folder, placement):
    """Files as ZeRO-3 ranks write them, with each rank's experts cut over two data-parallel ranks; then convert."""
    from deepspeed.checkpoint.ds_to_universal import _consolidate_zero3_autoep_expert_states
    ep_size, model_files, optimizer_files = len(PLACEMENTS[placement]), [], []
    for rank in range(2 * ep_size):
        data_rank, ep_rank = divmod(rank, ep_size)
        shard = _shards(placement)[ep_rank]
        per_rank = -(-shard.numel() // 2)
        flat = {
            state:
            torch.cat([_partition(_state(shard, weight, state), per_rank, data_rank) for weight in ranks.WEIGHTS])
            for state in STATES
        }
        layer = {
            "moe_layer_id": 0,
            "module_path": "",
            "num_experts": 6,
            "num_local_experts": len(shard),
            "ep_size": ep_size,
            "ep_rank": ep_rank,
            "ep_group_name": f"ep_size_{ep_size}",
            "expert_placement": _descriptor(placement),
            "expert_key_prefix": "experts",
            "checkpoint_format": "zero3_partitioned",
            "checkpoint_format_version": 1,
            "expert_data_parallel_rank": data_rank,
            "expert_data_parallel_world_size": 2,
            "global_expert_start": 0,
            "global_expert_end": 0,
        }
        model = {
            "ds_autoep_layers": [layer],
            "param_shapes": [{
                f"experts.{weight}": shard.shape
                for weight in ranks.WEIGHTS
            }]
        }
        optimizer = {
            "optimizer_state_dict": {
                "optimizer_state_dict": {
                    "state": {
                        0: {
                            "exp_avg": flat["exp_avg"],
                            "exp_avg_sq": flat["exp_avg_sq"]
                        }
                    }
                },
                "fp32_flat_groups": [flat["fp32"]],
                "ds_zero_partition_groups": [{
                    "partition_count": 2,
                    "partition_rank": data_rank
                }]
            }
        }
        for files, kind, content in ((model_files, "model", model), (optimizer_files, "optim", optimizer)):
            files.append(str(folder / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"))
            torch.save(content, files[-1])
    _consolidate_zero3_autoep_expert_states(str(folder), model_files, optimizer_files)


def _partition(tensor, per_rank, data_rank):
    own = tensor.flatten()[data_rank * per_rank:][:per_rank]
    return torch.nn.functional.pad(own, (0, per_rank - len(own)))


def _restore(content, placement, rank):
    from deepspeed.checkpoint.autoep_affine import autoep_placement_to_affine_map
    from deepspeed.checkpoint.universal_checkpoint import _resolve_autoep_partition
    param = torch.nn.Parameter(torch.zeros(1))
    param.ds_autoep_uc_meta = {
        "expert_placement": _descriptor(placement),
        "affine_map": json_copy(autoep_placement_to_affine_map(_descriptor(placement), SHAPE).to_dict()),
        "logical_shape": list(SHAPE),
        "ep_rank": rank,
        "local_experts": PLACEMENTS[placement][rank]
    }
    return _resolve_autoep_partition(param, content, content["param"], rank)
