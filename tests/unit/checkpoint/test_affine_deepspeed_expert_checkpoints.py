# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checkpoints of real training with AutoEP: what the library reads in them, and what `ds_affine reshard` writes."""

import shutil

import pytest
import torch

import affine_autoep_processes as ranks
from affine_rank_host import RankHost
from affine_universal_processes import convert
from deepspeed.checkpoint.affine_adapters.checkpoints import open_checkpoint
from deepspeed.checkpoint.affine_adapters.stored import CheckpointError
from ds_affine.cli import main
from test_affine_deepspeed_checkpoints import put_together, read_files

WORLD_SIZE, EP_SIZE = 4, 2
# ZeRO-1 with as many ranks for experts as for all else has one copy of each expert.
# The last one has ranks of the same experts beside each other, where the others have them apart.
RUNS = {
    "stage0": (0, 2),
    "stage1": (1, 2),
    "stage1_one_copy": (1, 4),
    "stage2": (2, 2),
    "stage3": (3, 2),
    "stage2_beside": (2, 2),
    "stage3_beside": (3, 2)
}
UNIVERSAL = {"stage1_universal": "stage1", "stage3_universal": "stage3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder):
    """``{checkpoint: {name: whole tensor}}``; a checkpoint is the folder of its name."""
    values = {}
    with RankHost() as host:
        for name, (stage, ep_size) in RUNS.items():
            beside = name.endswith("beside")
            answers = host.run(WORLD_SIZE, ranks.train, ep_size, stage, folder, name,
                               {"use_data_before_expert_parallelism": True} if beside else {})
            # One expert-parallel group, in order.
            group = answers[::WORLD_SIZE // ep_size] if beside else answers[:ep_size]
            experts = {expert: torch.cat([answer["experts"][expert] for answer in group]) for expert in ranks.NAMES}
            values[name] = {**answers[0]["others"], **experts}
        for source in UNIVERSAL.values():
            host.run(1, convert, folder, source, {})
    return values | {name: values[source] for name, source in UNIVERSAL.items()}


@pytest.mark.parametrize("name", [*RUNS, *UNIVERSAL])
def test_every_element_is_where_the_map_says(saved, folder, name):
    checkpoint = open_checkpoint(folder / name)
    found = {key: put_together(held) for key, held in checkpoint.parameters.items()}
    # AutoEP keeps the block that it replaced in the module.
    assert {key for key in found if ".mlp.gate." not in key} == set(saved[name])
    assert all(torch.equal(found[key], value) for key, value in saved[name].items())


@pytest.mark.parametrize("name", [*RUNS, *UNIVERSAL])
def test_experts_are_written_whole(saved, folder, name, capsys):
    one = folder / f"hf_{name}"
    assert main(["reshard", str(folder / name), str(one), "--to", "hf", "--quiet"]) == 0
    found = read_files(one)
    assert {key for key in found if ".mlp.gate." not in key} == set(saved[name])
    assert all(torch.equal(found[key], value) for key, value in saved[name].items())
    assert main(["verify", str(folder / name), str(one)]) == 0
    assert f"{len(found)} parameters" in capsys.readouterr().out


def test_the_number_of_ranks_of_experts_is_told(saved, folder, capsys):
    assert main(["inspect", str(folder / "stage3")]) == 0
    assert "ZeRO-3 over 4, experts over 2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["stage1", "stage2"])
def test_ranks_that_have_other_experts_than_they_should_are_found(saved, folder, tmp_path, name):
    shutil.copytree(folder / name, tmp_path / "swapped")
    first, second = (tmp_path / "swapped" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    first.rename(tmp_path / "first")
    second.rename(first)
    (tmp_path / "first").rename(second)
    with pytest.raises(CheckpointError, match="with|between them"):
        open_checkpoint(tmp_path / "swapped")


def test_model_states_of_another_rank_are_found(saved, folder, tmp_path):
    shutil.copytree(folder / "stage3", tmp_path / "swapped")
    shutil.copy(folder / "stage3" / "zero_pp_rank_0_mp_rank_00_model_states.pt",
                tmp_path / "swapped" / "zero_pp_rank_1_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="zero_pp_rank_1.*says that it is rank 0 of the experts"):
        open_checkpoint(tmp_path / "swapped")


@pytest.mark.parametrize("name", ["stage0", "stage2"])
def test_a_missing_expert_is_named(saved, folder, tmp_path, name):
    shutil.copytree(folder / name, tmp_path / "short")
    (tmp_path / "short" / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="the file of expert 2 of layer 1 is missing"):
        open_checkpoint(tmp_path / "short")


def with_other_states(source, destination, change):
    """A copy of a checkpoint, whose model states ``change`` has altered."""
    shutil.copytree(source, destination)
    path = destination / "mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=False)
    change(states)
    torch.save(states, path)
    return destination


def test_a_placement_that_contradicts_itself_is_refused(saved, folder, tmp_path):

    def place_elsewhere(states):
        states["ds_autoep_layers"][1]["expert_placement"]["ranks"][0]["experts"] = [0, 7]

    odd = with_other_states(folder / "stage2", tmp_path / "odd", place_elsewhere)
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states.pt: ds_autoep_layers does not say"):
        open_checkpoint(odd)


def test_experts_that_autoep_has_not_placed_are_refused(saved, folder, tmp_path):
    odd = with_other_states(folder / "stage2", tmp_path / "odd", lambda states: states.pop("ds_autoep_layers"))
    # The model states say that there are experts, even where their files were not copied.
    for expert in odd.glob("layer_*"):
        expert.unlink()
    with pytest.raises(CheckpointError, match="experts that AutoEP has not placed.*ds_to_universal"):
        open_checkpoint(odd)
