# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The adapters on real ZeRO-1 and ZeRO-2 engines on four ranks, beside the whole parameters that DeepSpeed has."""

import pytest
import torch

import affine_zero12_processes as ranks
from affine_processes import run_processes
from affine_zero_processes import BUFFERS, EMPTY, FROZEN, STEPS, TIED, TRAINED, ReplicatedModel
from affine_zero_views import check_views, holders

ROUND_ROBIN = "stage 2, round robin"
DTYPES = {
    name: getattr(torch, name.removeprefix("torch."))
    for name in ("torch.float32", "torch.float16", "torch.bfloat16")
}


@pytest.fixture(scope="module")
def said():
    return run_processes(ranks.WORLD_SIZE, ranks.run, timeout=400)


@pytest.fixture(scope="module")
def reports(said):
    """What every rank said: reports[rank][case][number of steps]."""
    return [report for report, _ in said]


def test_cases_are_those_of_both_optimizers(said):
    assert said[0][1] == {case: optimizer for case, (_, _, optimizer) in ranks.CASES.items()}


@pytest.mark.parametrize("case", ranks.CASES)
@pytest.mark.parametrize("number", range(STEPS + 1))
def test_weights_are_whole_on_every_rank(reports, case, number):
    names = {*TRAINED, *FROZEN, *EMPTY, *TIED, *BUFFERS}
    assert set(reports[0][case][number]["weights"]) == names
    for name in names:
        check_views([report[case][number]["weights"][name] for report in reports])


@pytest.mark.parametrize("case", ranks.CASES)
@pytest.mark.parametrize("number", range(STEPS + 1))
def test_master_maps_and_buffers_are_those_of_the_whole_master_weights(reports, case, number):
    """The buffers were taken before the first step."""
    assert set(reports[0][case][number]["master"]) == {*TRAINED, *TIED}
    for name in (*TRAINED, *TIED):
        views = [report[case][number]["master"][name] for report in reports]
        assert views[0]["dtype"] == "torch.float32"
        if case == ROUND_ROBIN:
            # DeepSpeed 0.19.8 looks for fp32 parts in the order before it reordered them, so that its whole parameter
            # is not the one that it trains. In fp32 the trained one is the model's own.
            views = [
                view | {
                    "full": report[case][number]["weights"][name]["full"]
                } for view, report in zip(views, reports)
            ]
        check_views(views)


@pytest.mark.parametrize("case", ranks.CASES)
def test_master_weights_are_what_the_weights_are_cast_from(reports, case):
    """Without DeepSpeed's own notion of where master weights are."""
    for name in (*TRAINED, *TIED):
        for report in reports:
            weights, master = (report[case][STEPS][kind][name] for kind in ("weights", "master"))
            dtype = DTYPES[weights["dtype"]]
            flat = torch.tensor(weights["full"], dtype=dtype)
            for location, buffer in master["buffers"].items():
                for piece in master["layout"].pieces_by_rank[location]:
                    own = torch.tensor(buffer).to(dtype).as_strided(piece.shape, piece.dest_strides, piece.dest_offset)
                    assert torch.equal(own, flat.as_strided(piece.shape, piece.source_strides, piece.source_offset))


@pytest.mark.parametrize("case", ranks.CASES)
def test_only_ranks_that_hold_some_are_in_a_map(reports, case):
    for name in TRAINED:
        assert min(holders(reports[0][case][0]["master"][name]).values()) > 0


def test_flat_buffers_cut_parameters_anywhere(reports):
    """In the optimizer's order inner.weight, cube, single, vector, matrix: 82 elements over partitions of 22."""
    views = reports[0]["stage 1, bf16, fp32 gradients"][0]["master"]
    assert {
        name: holders(views[name])
        for name in TRAINED
    } == {
        "inner.weight": {
            0: 12
        },
        "cube": {
            0: 10,
            1: 20
        },
        "single": {
            1: 1
        },
        "vector": {
            1: 1,
            2: 3
        },
        "matrix": {
            2: 19,
            3: 16
        }
    }


def test_cases_differ_in_where_parameters_are_cut(reports):
    cases = ("stage 1, bf16, fp32 gradients", "stage 2, aligned", ROUND_ROBIN, "stage 2, two copies")
    cuts = {case: str([holders(reports[0][case][0]["master"][name]) for name in TRAINED]) for case in cases}
    assert len(set(cuts.values())) == len(cases)


@pytest.mark.parametrize("name", TRAINED)
def test_groups_that_hold_a_copy_each_are_replicas(reports, name):
    layout = reports[0]["stage 2, two copies"][0]["master"][name]["layout"]
    sets = {piece.locations for pieces in layout.pieces_by_rank.values() for piece in pieces}
    # The first ranks of both groups are one set of holders, the second ones another.
    assert sets and sets <= {frozenset(same) for same in zip(*ReplicatedModel.GROUPS)}


@pytest.mark.parametrize("case", ranks.CASES)
@pytest.mark.parametrize("kind", ["weights", "master"])
def test_tied_names_are_said_to_be_one(reports, case, kind):
    views = reports[0][case][0][kind]
    assert {name: view["tied_to"] for name, view in views.items() if view["tied_to"]} == TIED


@pytest.mark.parametrize("case", ranks.CASES)
def test_steps_change_what_is_trained_and_only_that(reports, case):
    first, last = (reports[0][case][number]["weights"] for number in (0, STEPS))
    changed = {name for name in first if first[name]["full"] != last[name]["full"]}
    assert changed == {*TRAINED, *TIED}
