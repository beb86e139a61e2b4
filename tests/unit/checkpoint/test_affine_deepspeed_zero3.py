# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The ZeRO-3 adapters on real engines on four ranks, beside the parameters that DeepSpeed gathers."""

import math

import pytest
import torch

import affine_zero3_processes as ranks
from affine_processes import run_processes
from affine_zero_processes import BUFFERS, FROZEN, STEPS, TIED, TRAINED, ReplicatedModel
from affine_zero_views import check_one_map, check_views, holders

PARAMETERS = {**TRAINED, **FROZEN, **{name: TRAINED[first] for name, first in TIED.items()}}


@pytest.fixture(scope="module")
def reports():
    """What every rank said: reports[rank][case]."""
    return run_processes(ranks.WORLD_SIZE, ranks.run, timeout=400)


def of(reports, case, number, kind, name):
    return [report[case][number][kind][name] for report in reports]


@pytest.mark.parametrize("case", ranks.TRAINING)
@pytest.mark.parametrize("number", range(STEPS + 1))
def test_maps_and_buffers_are_those_of_the_gathered_parameters(reports, case, number):
    """The buffers were taken before the first step."""
    assert set(reports[0][case][number]["weights"]) == {*PARAMETERS, *BUFFERS}
    for name in (*PARAMETERS, *BUFFERS):
        check_views(of(reports, case, number, "weights", name))


@pytest.mark.parametrize("case", ranks.TRAINING)
@pytest.mark.parametrize("number", range(STEPS + 1))
def test_master_maps_and_buffers_are_those_of_the_gathered_master_weights(reports, case, number):
    views = reports[0][case][number]
    assert set(views["master"]) == {*TRAINED, *TIED}
    for name in (*TRAINED, *TIED):
        check_views(of(reports, case, number, "master", name))
        assert views["master"][name]["dtype"] == "torch.float32"
        assert views["master"][name]["layout"] == views["weights"][name]["layout"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parts_are_equal_but_for_the_last(reports, name):
    """By the rule of ZeRO-3, in plain slices."""
    numel = math.prod(PARAMETERS[name])
    part = math.ceil(numel / ranks.WORLD_SIZE)
    for rank, report in enumerate(reports):
        view = report["fp32"][STEPS]["weights"][name]
        assert view["buffers"] == {rank: view["full"][rank * part:(rank + 1) * part]}
        assert holders(view)[rank] == max(0, min(part, numel - rank * part))


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_of_the_module_are_held_by_all(reports, name):
    view = reports[0]["fp32"][0]["weights"][name]
    assert dict(view["layout"].shard_shapes) == {rank: BUFFERS[name] for rank in range(ranks.WORLD_SIZE)}


@pytest.mark.parametrize("case", ranks.TRAINING)
@pytest.mark.parametrize("kind", ["weights", "master"])
def test_tied_names_are_said_to_be_one(reports, case, kind):
    views = reports[0][case][0][kind]
    assert {name: view["tied_to"] for name, view in views.items() if view["tied_to"]} == TIED


@pytest.mark.parametrize("case", ranks.TRAINING)
def test_steps_change_what_is_trained_and_only_that(reports, case):
    first, last = (reports[0][case][number]["weights"] for number in (0, STEPS))
    changed = {name for name in first if first[name]["full"] != last[name]["full"]}
    assert changed == {*TRAINED, *TIED}


@pytest.mark.parametrize("number", range(STEPS + 1))
def test_one_parameter_under_locations_of_ones_own(reports, number):
    said = [report["fp32"][number]["cube alone"] for report in reports]
    check_one_map([layout for layout, _ in said])
    for rank, (layout, buffers) in enumerate(said):
        assert list(layout.shard_shapes) == ranks.PARAMETER_LOCATIONS
        own = reports[rank]["fp32"][number]["weights"]["cube"]["buffers"][rank]
        assert buffers == {ranks.PARAMETER_LOCATIONS[rank]: own}


@pytest.mark.parametrize("case", ranks.TRAINING)
def test_what_is_handed_out_moves_as_it_is(reports, case):
    """Through planner and executor, to rows on two of the ranks."""
    for name, shape in PARAMETERS.items():
        last = reports[0][case][STEPS]
        full = last["master"].get(name, last["weights"][name])["full"]
        whole = torch.tensor(full).to(torch.bfloat16).reshape(shape)
        expected = dict(zip(ranks.ROW_HOLDERS, (whole[:shape[0] // 2], whole[shape[0] // 2:])))
        for rank, report in enumerate(reports):
            assert report[f"{case}, moved"][name] == {
                location: expected[location].reshape(-1).tolist()
                for location, owner in ranks.ROW_HOLDERS.items() if owner == rank
            }


def test_engine_without_an_optimizer_has_weights_alone(reports):
    for name in (*PARAMETERS, *BUFFERS):
        check_views([report["without an optimizer"]["report"]["weights"][name] for report in reports])
    assert "no master weights of ZeRO stage 3" in reports[0]["without an optimizer"]["refusal"]


@pytest.mark.parametrize("number", range(STEPS + 1))
@pytest.mark.parametrize("kind", ["weights", "master"])
def test_groups_that_hold_a_copy_each_are_replicas(reports, number, kind):
    said = [report["two copies"]["reports"][number][kind] for report in reports]
    assert set(said[0]) >= set(TRAINED)
    for name in said[0]:
        check_views([views[name] for views in said])
    matrix = said[0]["matrix"]["layout"]
    assert [piece.locations for piece in matrix.pieces_by_rank[3]] == [frozenset([2, 3])] * 2


def test_a_process_alone_knows_its_own_group(reports):
    for rank, report in enumerate(reports):
        own, = (group for group in ReplicatedModel.GROUPS if rank in group)
        assert {name: report["two copies"]["alone"][name] for name in PARAMETERS} == dict.fromkeys(PARAMETERS, own)


def test_secondary_partitions_live_from_forward_pass_to_step(reports):
    for report in reports:
        assert report["hpZ"]["present"] == {"after a step": sorted(FROZEN), "after a forward pass": sorted(PARAMETERS)}


@pytest.mark.parametrize("name", PARAMETERS)
def test_secondary_partitions_are_whole_in_every_small_group(reports, name):
    views = [report["hpZ"]["report"]["secondary"][name] for report in reports]
    check_views(views, location_of=lambda rank: ranks.WORLD_SIZE + rank)
    # The part of a small group is cut from the length that is padded for the whole job.
    numel = math.prod(PARAMETERS[name])
    part = math.ceil(numel / ranks.WORLD_SIZE) * ranks.WORLD_SIZE // ranks.HPZ
    sizes = [min(part, numel), numel - min(part, numel)] * 2
    assert list(holders(views[0]).values()) == sizes


@pytest.mark.parametrize("name", PARAMETERS)
def test_secondary_partitions_unite_with_the_primary_ones(reports, name):
    said = [report["hpZ"] for report in reports]
    check_views([report["report"]["weights"][name] for report in said])
    united = [report["united"][name] for report in said]
    check_one_map(united)
    assert sorted(united[0].shard_shapes) == list(range(2 * ranks.WORLD_SIZE))
