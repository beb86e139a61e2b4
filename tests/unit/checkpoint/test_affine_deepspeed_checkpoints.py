# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checkpoints that real DeepSpeed engines saved: what the library reads in them, and what `ds_affine reshard` writes.

Expected are the whole tensors that DeepSpeed itself gathered when it saved. They are put together here from pieces of
maps element by element, and cut into shards by torch alone.
"""

import argparse
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

import affine_checkpoint_processes as ranks
import affine_universal_processes as tensor_parallel
from affine_oracle import check_map, shard_element_ids
from affine_rank_host import RankHost
from affine_shard_rules import whole_parameter
from affine_universal_processes import HEAD_WIDTH, HEADS, HIDDEN, INNER, LAYERS, VOCABULARY, Training
from affine_zero_processes import EMPTY, FROZEN, TIED, TRAINED
from deepspeed.checkpoint.affine_adapters.checkpoints import open_checkpoint
from deepspeed.checkpoint.affine_adapters.server import DecoderModel
from deepspeed.checkpoint.affine_adapters.stored import CheckpointError
from ds_affine.cli import main
from test_affine_server_adapter import UNTOUCHED, Loader

KV_HEADS = 4
AUTOTP = {
    "llama_zero3": ("llama", 3),
    "llama_zero1": ("llama", 1),
    "tied_zero3": ("tied", 3),
    "fused_zero1": ("fused", 1)
}
UNIVERSAL = {"llama_zero3_universal": "llama_zero3", "zero3_fp32_universal": "zero3_fp32"}
ROUND_ROBIN = "zero2_round_robin"
READ = [name for name in (*ranks.RUNS, *AUTOTP, *UNIVERSAL) if name != ROUND_ROBIN]
# Their model states are without what was not trained.
ADAPTERS = ("lora_zero2_adapters", "lora_zero3_adapters")
KINDS = {
    "zero3_bf16": "ZeRO-3 over 4",
    "zero1_bf16": "ZeRO-1 over 4",
    "zero1_bf16_fp32_gradients": "ZeRO-1 over 4",
    "zero2_fp32": "ZeRO-2 over 4",
    "without_zero": "without ZeRO",
    "llama_zero3": "ZeRO-3 over 2, tensor-parallel over 2",
    "llama_zero1": "ZeRO-1 over 2, tensor-parallel over 2",
    "llama_zero3_universal": "universal",
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder):
    """``{checkpoint: {name: whole tensor}}``; a checkpoint is the folder of its name."""
    with RankHost() as host:
        values = host.run(ranks.WORLD_SIZE, ranks.save, folder)[0]
        for name, (model, stage) in AUTOTP.items():
            training = Training(model, 2, stage, KV_HEADS, stop=ranks.STEPS, save=name, save_at=ranks.STEPS)
            values[name] = _whole(host.run(ranks.WORLD_SIZE, tensor_parallel.train, training, folder))
        host.run(1, tensor_parallel.convert, folder, "llama_zero3", {})
        host.run(1, tensor_parallel.convert, folder / "zero3_fp32", ranks.STEP,
                 {"output_folder": str(folder / "zero3_fp32_universal")})
    return values | {name: values[source] for name, source in UNIVERSAL.items()}


def _whole(answers):
    """From what the ranks of a tensor-parallel run said."""
    parts = [answer["steps"][-1]["state"]["parameters"] for answer in answers[:2]]
    whole = {name: whole_parameter(name, [part[name]["fp32"] for part in parts], KV_HEADS) for name in parts[0]}
    # The ranks name a tied parameter once.
    return whole if "lm_head.weight" in whole or "lm_head.bias" in whole else {
        **whole, "lm_head.weight": whole["model.embed_tokens.weight"]
    }


@pytest.fixture(scope="module")
def hf(saved, folder):
    """A function from a checkpoint to it as one folder of safetensors files, and what is to be in that."""

    def reshard(name, *options):
        destination = folder / f"hf_{name}"
        if not destination.exists():
            assert main(["reshard", str(folder / name), str(destination), "--to", "hf", "--quiet", *options]) == 0
        return destination

    return reshard


def read_names(name):
    """Names that a checkpoint has of those that the model has."""
    if name in ADAPTERS:
        return {key for key in saved_names(name) if "lora" in key}
    return saved_names(name)


def saved_names(name):
    """The model's own names, without buffers that are in no state dict."""
    if name.startswith("lora"):
        return {key for key in ranks.AdaptedModel().state_dict()}
    return {*TRAINED, *FROZEN, *TIED, "table", *(EMPTY if ranks.RUNS[name].model is ranks.small_with_empty else ())}


def put_together(held):
    """The whole tensor, element by element; replicas must agree."""
    whole = torch.zeros(held.layout.numel, dtype=held.dtype)
    contents = {location: torch.from_numpy(ids) for location, ids in shard_element_ids(held.layout).items()}
    for location, ids in contents.items():
        whole[ids] = held.buffers[location].flatten()
    for location, ids in contents.items():
        assert torch.equal(whole[ids], held.buffers[location].flatten())
    return whole.view(held.layout.logical_shape)


def read_files(destination):
    """All tensors of a folder by the reference reader, no name twice."""
    tensors = {}
    for path in sorted(destination.glob("*.safetensors")):
        read = load_file(path)
        assert not tensors.keys() & read.keys()
        tensors.update(read)
    return tensors


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def run_command(capsys, *arguments):
    """Exit code, and what was written to standard error."""
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


# ------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("name", READ)
def test_every_parameter_is_the_whole_one_that_deepspeed_gathered(saved, folder, name):
    parameters = open_checkpoint(folder / name).parameters
    if name in ranks.RUNS:
        assert parameters.keys() == read_names(name)
    for key, held in parameters.items():
        check_map(held.layout)
        assert_same({key: put_together(held)}, {key: saved[name][key]})
        assert held.buffers.keys() == held.layout.shard_shapes.keys()


@pytest.mark.parametrize("name", READ)
def test_nothing_of_the_model_is_missing_without_a_word(saved, folder, name):
    checkpoint = open_checkpoint(folder / name)
    missing = saved[name].keys() - checkpoint.parameters.keys() - checkpoint.left_out.keys()
    # A buffer that no state dict has, and what the user excluded.
    excluded = {key for key in saved[name] if "lora" not in key} if name in ADAPTERS else set()
    assert missing == {"inner.counter"} & saved[name].keys() | excluded


@pytest.mark.parametrize("name", KINDS)
def test_kind_says_what_wrote_it(saved, folder, name):
    assert open_checkpoint(folder / name).kind == KINDS[name]


@pytest.mark.parametrize("name", ["zero3_fp32", "zero3_bf16", "zero1_bf16_fp32_gradients", "zero2_fp32"])
def test_tied_names_are_said_to_be_one(saved, folder, name):
    parameters = open_checkpoint(folder / name).parameters
    assert {key: held.tied_to for key, held in parameters.items() if held.tied_to} == TIED
    for further, first in TIED.items():
        assert parameters[further].buffers is parameters[first].buffers


def test_tied_embeddings_of_autotp_are_said_to_be_one(saved, folder):
    parameters = open_checkpoint(folder / "tied_zero3").parameters
    assert {
        key: held.tied_to
        for key, held in parameters.items() if held.tied_to
    } == {
        "lm_head.weight": "model.embed_tokens.weight"
    }


def test_trained_parameters_are_cut_and_others_are_not(saved, folder):
    """The comparisons above mean something: what is read is spread over files."""
    parameters = open_checkpoint(folder / "zero3_bf16").parameters
    assert len(parameters["matrix"].buffers) == len(parameters["frozen"].buffers) == 4
    assert len(parameters["single"].buffers) == 4 and parameters["single"].layout.shard_shapes[1] == (0, )
    assert list(parameters["table"].buffers) == [0]
    parameters = open_checkpoint(folder / "llama_zero3").parameters
    assert set(parameters["lm_head.weight"].buffers) == {0, 1, 2, 3}


def test_the_folder_above_is_read_by_its_latest_step(saved, folder):
    above, step = (open_checkpoint(path) for path in (folder / "zero2_fp32", folder / "zero2_fp32" / ranks.STEP))
    assert above.parameters.keys() == step.parameters.keys()


def test_steps_trained_what_is_compared(saved):
    """No parameter still is as it was made, so that master weights and weights of bfloat16 differ."""
    made = dict(ranks.small().named_parameters())
    for name in TRAINED:
        assert not torch.equal(saved["zero3_fp32"][name], made[name])
        master = saved["zero3_bf16"][name]
        assert not torch.equal(master, master.bfloat16().float())


@pytest.mark.parametrize(
    "name", [name for name in ranks.RUNS if name not in (ROUND_ROBIN, "without_zero") and "gradients" not in name])
def test_deepspeeds_own_tool_reads_the_same(saved, folder, name):
    """It has no frozen parameters of ZeRO-1 and no empty ones; BF16_Optimizer's checkpoints and those without ZeRO it
    cannot read."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(folder / name), tag=ranks.STEP)
    parameters = open_checkpoint(folder / name).parameters
    left = parameters.keys() - theirs.keys()
    assert left <= ({"empty", "frozen"} if name.startswith("zero1") else {"empty"})
    assert_same({key: put_together(parameters[key]).float()
                 for key in theirs}, {
                     key: tensor.float()
                     for key, tensor in theirs.items()
                 })


def test_wrong_places_of_round_robin_gradients_are_refused(saved, folder, capsys):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(folder / ROUND_ROBIN), tag=ranks.STEP)
    assert not torch.equal(theirs["matrix"], saved[ROUND_ROBIN]["matrix"]), "DeepSpeed saves right places now"
    with pytest.raises(CheckpointError, match="round_robin_gradients"):
        open_checkpoint(folder / ROUND_ROBIN)
    code, error = run_command(capsys, "reshard", folder / ROUND_ROBIN, folder / "never", "--to", "hf")
    assert code == 2 and "round_robin_gradients" in error and not (folder / "never").exists()


# ------------------------------------------------------------------------------------------ hf


def expected_hf(saved, folder, name):
    """First names alone."""
    parameters = open_checkpoint(folder / name).parameters
    return {key: saved[name][key].contiguous() for key, held in parameters.items() if not held.tied_to}


@pytest.mark.parametrize("name", READ)
def test_resharded_to_one_file_it_is_the_same(saved, folder, hf, name):
    destination = hf(name)
    assert [path.name for path in destination.iterdir()] == ["model.safetensors"]
    assert_same(read_files(destination), expected_hf(saved, folder, name))
    assert main(["verify", str(folder / name), str(destination)]) == 0


@pytest.mark.parametrize("name, limit", [("zero2_fp32", 100), ("lora_zero3", 60), ("llama_zero3", 10_000)])
def test_resharded_to_several_files_it_is_the_same(saved, folder, name, limit, tmp_path):
    assert main([
        "reshard",
        str(folder / name),
        str(tmp_path / "out"), "--to", "hf", "--file-size",
        str(limit), "--workers", "3", "--quiet"
    ]) == 0
    expected = expected_hf(saved, folder, name)
    assert_same(read_files(tmp_path / "out"), expected)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert len(files) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys() and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    for file in files:
        sizes = [tensor.nbytes for tensor in load_file(tmp_path / "out" / file).values()]
        assert sum(sizes) <= limit or len(sizes) == 1
    assert_same({
        key: put_together(held)
        for key, held in open_checkpoint(tmp_path / "out").parameters.items()
    }, expected)


@pytest.mark.parametrize("name", ["zero3_fp32", "zero1_bf16", "llama_zero1"])
def test_resharded_to_another_dtype_it_is_cast(saved, folder, name, tmp_path):
    assert main(["reshard",
                 str(folder / name),
                 str(tmp_path / "out"), "--to", "hf", "--dtype", "bfloat16", "--quiet"]) == 0
    assert_same(read_files(tmp_path / "out"), {
        key: tensor.bfloat16()
        for key, tensor in expected_hf(saved, folder, name).items()
    })


@pytest.mark.parametrize("options, left", [
    (["--include", "lora_*", "--include", "layers.1.lora_A*"], {"layers.1.lora_A.weight"}),
    (["--include", "*lora*", "--exclude", "layers.0.*"], {"layers.1.lora_A.weight", "layers.1.lora_B.weight"}),
    (["--exclude", "*.weight"], {"layers.0.base.bias", "layers.1.base.bias", "norm.bias"}),
])
def test_only_chosen_parameters_are_written(saved, folder, options, left, tmp_path):
    assert main(["reshard", str(folder / "lora_zero2"), str(tmp_path / "out"), "--to", "hf", "--quiet", *options]) == 0
    assert_same(read_files(tmp_path / "out"), {name: saved["lora_zero2"][name] for name in left})


def test_choosing_nothing_is_an_error(saved, folder, tmp_path, capsys):
    code, error = run_command(capsys, "reshard", folder / "lora_zero2", tmp_path / "out", "--to", "hf", "--include",
                              "no such name")
    assert code == 2 and "--include" in error and list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_a_real_one_writes_and_writes_nothing(saved, folder, tmp_path, capsys):
    arguments = ["reshard", str(folder / "llama_zero3"), str(tmp_path / "out"), "--to", "hf", "--file-size", "20KB"]
    assert main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(arguments) == 0
    files = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) > 2 and all(file in said for file in files)


# ------------------------------------------------------------------------------------------ tp-N


def cut_axis(name):
    """Axis along which a linear layer's weight is cut."""
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def read_ranks(destination, degree):
    """What each rank's file holds."""
    maps = json.loads((destination / "affine_maps.json").read_text())
    assert sorted(map(int, maps["files"])) == list(range(degree))
    return [load_file(destination / maps["files"][str(rank)]) for rank in range(degree)]


@pytest.mark.parametrize("name, degree", [("llama_zero3", 2), ("llama_zero1", 4), ("llama_zero3_universal", 2)])
def test_split_by_patterns_it_is_what_torch_cuts(saved, folder, name, degree, tmp_path):
    # Embedding and head stay whole: no degree here divides their 101 rows.
    splits = [r"--split=[qkv]_proj\.=0", "--split=gate_proj|up_proj=0", r"--split=(o|down)_proj\.weight$=1"]
    assert main(["reshard",
                 str(folder / name),
                 str(tmp_path / "out"), "--to", f"tp-{degree}", "--quiet", *splits]) == 0
    expected = [{} for _ in range(degree)]
    for key, tensor in saved[name].items():
        whole = re.search("embed_tokens|lm_head|norm", key)
        for rank, shard in enumerate([tensor] * degree if whole else tensor.chunk(degree, cut_axis(key))):
            expected[rank][key] = shard
    for found, shards in zip(read_ranks(tmp_path / "out", degree), expected):
        assert_same(found, shards)
    assert_read_again(tmp_path / "out", saved[name])


def assert_read_again(destination, expected):
    """The shards are a checkpoint themselves."""
    parameters = open_checkpoint(destination).parameters
    for held in parameters.values():
        check_map(held.layout)
    assert_same({name: put_together(held) for name, held in parameters.items()}, expected)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def padded_rows(degree):
    return -(-VOCABULARY // 64) * 64 // degree


@pytest.mark.parametrize("name, degree", [("llama_zero3", 2), ("llama_zero3", 4), ("llama_zero1", 2)])
def test_by_a_configuration_it_is_cut_along_heads(saved, folder, config_file, name, degree, tmp_path):
    assert main([
        "reshard",
        str(folder / name),
        str(tmp_path / "out"), "--to", f"tp-{degree}", "--config",
        str(config_file), "--quiet"
    ]) == 0
    for rank, found in enumerate(read_ranks(tmp_path / "out", degree)):
        expected = {}
        for key, tensor in saved[name].items():
            if "embed_tokens" in key or "lm_head" in key:
                expected[key] = tensor[rank * padded_rows(degree):(rank + 1) * padded_rows(degree)]
            elif "norm" in key:
                expected[key] = tensor
            else:
                expected[key] = tensor.chunk(degree, cut_axis(key))[rank]
        assert_same(found, expected)
    assert_read_again(tmp_path / "out", saved[name])


@pytest.mark.parametrize("name, degree", [("llama_zero3", 2), ("llama_zero1", 8), ("llama_zero3_universal", 4)])
def test_fused_it_is_what_a_server_loads(saved, folder, config_file, name, degree, tmp_path):
    """Eight ranks and four key and value heads: each is on two ranks."""
    assert main([
        "reshard",
        str(folder / name),
        str(tmp_path / "out"), "--to", f"tp-{degree}", "--config",
        str(config_file), "--fused", "--quiet"
    ]) == 0
    sizes = {key: size for key, size in CONFIG.items() if key != "model_type"}
    model = DecoderModel(head_dim=HEAD_WIDTH, **sizes)
    for rank, found in enumerate(read_ranks(tmp_path / "out", degree)):
        expected = Loader(model, degree, 64, rank).load(saved[name])
        for key in ("model.embed_tokens.weight", "lm_head.weight"):
            # What the loader leaves as it is, is padding, and zero on disk.
            padding = (expected[key] == UNTOUCHED).all(dim=1)
            assert int(padding.sum()) == max(0, min((rank + 1) * padded_rows(degree) - VOCABULARY,
                                                    padded_rows(degree)))
            expected[key][padding] = 0
        assert_same(found, expected)
    assert_read_again(tmp_path / "out", saved[name])
    assert main(["verify", str(folder / name), str(tmp_path / "out")]) == 0


def test_by_a_configuration_in_the_source_folder(saved, folder, hf, config_file, tmp_path):
    """From one form of safetensors to another, as --dtype casts it."""
    source = tmp_path / "hf"
    shutil.copytree(hf("llama_zero1"), source)
    shutil.copy(config_file, source / "config.json")
    assert main(["reshard", str(source), str(tmp_path / "out"), "--to", "tp-2", "--dtype", "float16", "--quiet"]) == 0
    found = read_ranks(tmp_path / "out", 2)[1]
    name = "model.layers.1.self_attn.k_proj.weight"
    assert_same({name: found[name]}, {name: saved["llama_zero1"][name].half().chunk(2)[1]})


def test_tied_embeddings_need_a_configuration_that_says_so(saved, folder, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    assert main([
        "reshard",
        str(folder / "tied_zero3"),
        str(tmp_path / "out"), "--to", "tp-2", "--config",
        str(path), "--fused", "--quiet"
    ]) == 0
    found = read_ranks(tmp_path / "out", 2)[0]
    assert "lm_head.weight" not in found
    assert torch.equal(found["model.embed_tokens.weight"],
                       saved["tied_zero3"]["model.embed_tokens.weight"][:padded_rows(2)])


@pytest.mark.parametrize("arguments, message", [
    (["--to", "tp-2"], "--config"),
    (["--to", "tp-2", "--split=embed_tokens=0"], "model.embed_tokens.weight.*evenly"),
    (["--to", "tp-3", "--config", "CONFIG"], "tp_degree 3 does not divide"),
    (["--to", "tp-2", "--config", "CONFIG", "--fused", "--include", "*norm*"], "--fused stores a whole model"),
])
def test_what_cannot_be_cut_is_refused(saved, folder, config_file, arguments, message, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    arguments = [str(config_file) if argument == "CONFIG" else argument for argument in arguments]
    code, error = run_command(capsys, "reshard", folder / "llama_zero3", tmp_path / "out", *arguments)
    assert code == 2 and re.search(message, error), error
    assert sorted(tmp_path.iterdir()) == before


# ------------------------------------------------------------------------------------------ broken checkpoints


def step_folder(folder, name):
    return folder / name / ranks.STEP if name in ranks.RUNS else folder / name


# Checkpoints, and whether all of the files that match are needed.
FILES = [("zero3_bf16", "*_states.pt"), ("zero1_bf16", "*_states.pt"),
         ("zero1_bf16_fp32_gradients", "*_optim_states.pt"), ("lora_zero3", "*_states.pt"),
         ("llama_zero3", "*_optim_states.pt"), ("llama_zero1", "*_states.pt")]


@pytest.mark.parametrize("name, pattern", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut in half", "without its last byte", "empty"])
def test_a_missing_or_truncated_file_is_named_before_anything_is_written(saved, folder, name, pattern, damage,
                                                                         tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(step_folder(folder, name), source)
    files = sorted(source.glob(pattern))
    assert len(files) >= 4
    for path in files:
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(content[:{
                "cut in half": len(content) // 2,
                "without its last byte": -1,
                "empty": 0
            }[damage]])
        code, error = run_command(capsys, "reshard", source, tmp_path / "out", "--to", "hf")
        assert code == 2, path.name
        assert path.name in error or damage == "missing" and _missing_rank(path.name, error), error
        assert "Traceback" not in error
        assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
        path.write_bytes(content)
    assert run_command(capsys, "reshard", source, tmp_path / "out", "--to", "hf", "--quiet") == (0, "")


def _missing_rank(file, error):
    """Whether the error tells whose file it is."""
    kind = "model" if "model" in file else "optim"
    numbers = [int(part) for part in file.replace("_states.pt", "").split("_") if part.isdigit()]
    data_rank, rank = numbers if len(numbers) == 2 else (0, *numbers)
    return f"{kind} states of data-parallel rank {data_rank}, tensor-parallel rank {rank} are missing" in error


def test_a_class_in_a_rank_file_is_refused_and_not_made(saved, folder, tmp_path, capsys):
    """DeepSpeed lets users save anything beside the model."""
    source = tmp_path / "source"
    shutil.copytree(step_folder(folder, "zero2_fp32"), source)
    path = source / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    content["client"] = argparse.Namespace(seed=1)
    torch.save(content, path)
    code, error = run_command(capsys, "reshard", source, tmp_path / "out", "--to", "hf")
    assert code == 2 and path.name in error and "Namespace" in error
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_buffers_beside_tensor_parallel_shards_are_whole(saved, folder, tmp_path):
    """AutoTP has maps of parameters alone."""
    source = tmp_path / "source"
    shutil.copytree(step_folder(folder, "llama_zero3"), source)
    for path in source.glob("*_model_states.pt"):
        content = torch.load(path, weights_only=False)
        content["module"]["rope.scale"], content["buffer_names"] = torch.arange(3.), ["rope.scale"]
        torch.save(content, path)
    held = open_checkpoint(source).parameters["rope.scale"]
    assert sorted(held.buffers) == [0, 2]
    assert all(torch.equal(tensor, torch.arange(3.)) for tensor in held.buffers.values())
    assert put_together(held).tolist() == [0, 1, 2]
