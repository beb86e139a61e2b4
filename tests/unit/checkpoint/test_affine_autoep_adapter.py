# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Maps of AutoEP placements, against indexing of experts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint.affine_adapters.autoep import autoep_maps, autoep_placement_map


def _placement(experts_by_rank, **changes):
    count = max((max(experts, default=-1) for experts in experts_by_rank), default=-1) + 1
    ranks = [{"rank": rank, "experts": list(experts)} for rank, experts in enumerate(experts_by_rank)]
    return {"version": 1, "num_experts": count, "ep_size": len(ranks), "ranks": ranks, **changes}


@st.composite
def _placements(draw):
    """Any experts on any rank in any order; those that nobody drew go to the last rank."""
    count = draw(st.integers(1, 7))
    expert = st.integers(0, count - 1)
    experts = draw(st.lists(st.lists(expert, unique=True), min_size=1, max_size=5))
    missing = sorted(set(range(count)).difference(*experts))
    experts[-1] = experts[-1] + [expert for expert in missing if expert not in experts[-1]]
    return experts, draw(st.lists(st.integers(0, 3), max_size=2))


@settings(max_examples=200)
@given(_placements())
def test_shards_are_the_experts_of_the_ranks(case):
    experts_by_rank, tail = case
    count = 1 + max(max(experts, default=0) for experts in experts_by_rank)
    full = torch.arange(float(torch.Size([count, *tail]).numel())).reshape(count, *tail)
    layout = autoep_placement_map(_placement(experts_by_rank), full.shape)
    layout.validate()
    layout.validate_coverage()
    shards = {rank: full[experts] for rank, experts in enumerate(experts_by_rank)}
    for rank, shard in shards.items():
        extracted = layout.extract(full, rank)
        assert extracted.shape == shard.shape and torch.equal(extracted, shard)
    assert torch.equal(layout.rebuild(shards), full)


@settings(max_examples=200)
@given(_placements())
def test_holders_are_all_ranks_with_the_expert(case):
    experts_by_rank, _ = case
    layout = autoep_placement_map(_placement(experts_by_rank), (1 + max(map(max, filter(None, experts_by_rank))), ))
    for rank, experts in enumerate(experts_by_rank):
        held = [expert for piece in layout.pieces_by_rank[rank] for expert in piece.source_offsets()]
        assert sorted(held) == sorted(experts)
        for piece in layout.pieces_by_rank[rank]:
            for expert in piece.source_offsets():
                assert piece.locations == {other for other, ids in enumerate(experts_by_rank) if expert in ids}


def test_size_is_that_of_the_placement_and_not_of_the_weights():
    layout = autoep_placement_map(_placement([range(0, 128), range(128, 256)]), (256, 2**14, 2**14))
    assert [len(pieces) for pieces in layout.pieces_by_rank.values()] == [1, 1]
    assert layout.pieces_by_rank[1][0].source_offset == 2**35


@pytest.mark.parametrize("placement, message", [
    (_placement([[0, 1]], version=2), "has version 2"),
    (_placement([[0, 2]]), r"No rank of the placement holds the experts .*1"),
    (_placement([[0, 1, 0]]), r"Rank 0 of the placement has the experts \[0, 1, 0\]"),
    (_placement([[0, 1]], num_experts=1), "they must be different ones of 0 to 0"),
    (_placement([[0, -1]]), r"Rank 0 of the placement has the experts \[0, -1\]"),
    (_placement([[0], [1]], ep_size=3), "with ep_size 3 they must be 0 to ep_size - 1"),
    (_placement([[0]], ranks=[{
        "rank": 0,
        "experts": [0]
    }] * 2), "lists rank 0 twice"),
    (_placement([[0]], ranks=()), "lists the ranks"),
])
def test_placements_that_are_none_are_refused(placement, message):
    with pytest.raises(ValueError, match=message):
        autoep_placement_map(placement, (placement["num_experts"], 2))


@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_weights_of_another_number_of_experts_are_refused(shape):
    with pytest.raises(ValueError, match="2 experts have a shape that begins with 2"):
        autoep_placement_map(_placement([[0, 1]]), shape)


@pytest.mark.parametrize(
    "placement", [3, _placement([[0]], ranks=[{
        "rank": 0,
        "experts": ["a"]
    }]), _placement([[0]], num_experts=None)])
def test_other_things_than_integers_are_refused(placement):
    with pytest.raises(TypeError):
        autoep_placement_map(placement, (1, ))


def test_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="has no AutoEP layer"):
        autoep_maps(torch.nn.Linear(2, 2))
