# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Checkpoint files without DeepSpeed: files that are not trusted, files that are written, and the commands on both."""

import fractions
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import affine_reshard_processes as processes
from affine_oracle import shard_element_ids
from affine_processes import run_processes
from deepspeed.checkpoint.affine import ParamAffineMap, contiguous_split_map, replicated_map
from deepspeed.checkpoint.affine_adapters import safetensors_files
from deepspeed.checkpoint.affine_adapters.checkpoints import open_checkpoint
from deepspeed.checkpoint.affine_adapters.disk_layouts import server_disk_layout, split_layout, whole_layout
from deepspeed.checkpoint.affine_adapters.safetensors_files import new_file
from deepspeed.checkpoint.affine_adapters.server import DecoderModel, server_layout
from deepspeed.checkpoint.affine_adapters.stored import CheckpointError
from deepspeed.checkpoint.affine_adapters.torch_files import load_mapped
from ds_affine import reshard as reshard_module
from ds_affine.cli import main

MODEL_STATES = "mp_rank_00_model_states.pt"
INDEX, MAPS = "model.safetensors.index.json", "affine_maps.json"
MIB = 1 << 20


def tensors(rows=8):
    """Of several dtypes and numbers of axes; no two elements of a tensor are equal but where the dtype has few."""
    generator = torch.Generator().manual_seed(1)
    return {
        "layer.0": torch.randn(rows, 3, generator=generator),
        "layer.1": torch.randn(rows, 2, 3, generator=generator).bfloat16(),
        "layer.2": torch.randn(rows, generator=generator).double(),
        "norm": torch.randn(5, generator=generator).half(),
        "steps": torch.tensor(7),
        "mask": torch.arange(6) % 2 == 0,
        "bytes": torch.arange(9, dtype=torch.uint8),
        "eight": torch.randn(7, generator=generator).to(torch.float8_e4m3fn),
        "nothing": torch.zeros(0, 3),
    }


def save_folder(folder, **files):
    """A folder of safetensors files, by name without suffix; default: the tensors above in one."""
    folder.mkdir()
    for name, content in (files or {"model": tensors()}).items():
        save_file(content, folder / f"{name}.safetensors")
    return folder


def save_engine(folder, content=None):
    """A folder that DeepSpeed might have written without ZeRO."""
    folder.mkdir()
    torch.save({"module": tensors()} if content is None else content, folder / MODEL_STATES)
    return folder


@pytest.fixture
def source(tmp_path):
    return save_folder(tmp_path / "source")


@pytest.fixture
def shards(source, tmp_path):
    """The same over two ranks."""
    processes.reshard_over_ranks(source, tmp_path / "shards", 2)
    return tmp_path / "shards"


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not same_bits(found[name], tensor)] == []


def read_files(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def run(capsys, *arguments):
    """Exit code, standard output and standard error of a command."""
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out, said.err


# ------------------------------------------------------------------------------------------ files of torch.save


class Shell:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}", )


class Evaluated:

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return eval, (f"open({str(self.mark)!r}, 'w')", )


def test_what_is_tried_below_is_malicious(tmp_path):
    for kind in (Shell, Evaluated):
        pickle.loads(pickle.dumps(kind(tmp_path / kind.__name__)))
    assert {path.name for path in tmp_path.iterdir()} == {"Shell", "Evaluated"}


@pytest.mark.parametrize("kind", [Shell, Evaluated])
@pytest.mark.parametrize("place", ["beside", "instead", "in the module", "as a key", "universal", "optim", "second"])
def test_code_in_a_file_is_refused_and_not_run(kind, place, tmp_path):
    bad = kind(tmp_path / "mark")
    content = {"beside": {"module": tensors(), "args": bad}, "instead": bad, "in the module": {"module": {"w": bad}},
               "as a key": {"module": tensors(), (bad, ): 1}}.get(place, {"module": tensors()})  # yapf: disable
    folder = save_engine(tmp_path / "folder", content)
    if place == "universal":
        (folder / "zero" / "w").mkdir(parents=True)
        torch.save({"param": bad}, folder / "zero" / "w" / "fp32.pt")
    if place == "optim":
        torch.save({"optimizer_state_dict": bad}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    if place == "second":
        torch.save(bad, folder / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match=r"\.pt: holds what no checkpoint of DeepSpeed holds.*(system|eval)"):
        open_checkpoint(folder)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("write", [
    lambda bad, path: path.write_bytes(pickle.dumps(bad)),
    lambda bad, path: torch.save(bad, path, _use_new_zipfile_serialization=False),
])
def test_code_in_a_file_of_an_old_format_is_refused_and_not_run(write, tmp_path):
    folder = save_engine(tmp_path / "folder")
    write(Shell(tmp_path / "mark"), folder / MODEL_STATES)
    with pytest.raises(CheckpointError, match=MODEL_STATES):
        open_checkpoint(folder)
    assert not (tmp_path / "mark").exists()


def test_what_the_program_allows_elsewhere_is_not_allowed_here(tmp_path):
    good = save_engine(tmp_path / "good")
    bad = save_engine(tmp_path / "bad", {"module": tensors(), "rate": fractions.Fraction(1, 3)})
    with torch.serialization.safe_globals([fractions.Fraction]):
        before = torch.serialization.get_safe_globals()
        assert torch.load(bad / MODEL_STATES, weights_only=True)["rate"] == fractions.Fraction(1, 3)
        open_checkpoint(good)
        with pytest.raises(CheckpointError, match="Fraction"):
            open_checkpoint(bad)
        assert set(torch.serialization.get_safe_globals()) == set(before)
    assert fractions.Fraction not in torch.serialization.get_safe_globals()


def test_threads_that_read_leave_what_the_program_allows(tmp_path):
    folder = save_engine(tmp_path / "folder")
    with torch.serialization.safe_globals([fractions.Fraction]):
        before = set(torch.serialization.get_safe_globals())
        with ThreadPoolExecutor(4) as pool:
            for content in pool.map(load_mapped, [folder / MODEL_STATES] * 200):
                assert content["module"].keys() == tensors().keys()
        assert set(torch.serialization.get_safe_globals()) == before


def test_classes_of_deepspeed_are_stand_ins_without_behaviour(tmp_path):
    """No class of these names is there when they are read, as without DeepSpeed."""
    path = tmp_path / "states.pt"
    torch.save({"zero_stage": 3, "weights": torch.ones(2)}, path)
    # {"stage": ZeroStageEnum(3)}
    _replace_pickle(path,
                    b"\x80\x02}X\x05\x00\x00\x00stagecdeepspeed.runtime.zero.config\nZeroStageEnum\nK\x03\x85Rs.")
    stage = load_mapped(path)["stage"]
    assert stage.value == 3 and type(stage).__mro__[-2].__module__.startswith("deepspeed.checkpoint.affine_adapters")


def _replace_pickle(path, data):
    """Put another pickle into a file of torch.save."""
    with zipfile.ZipFile(path) as file:
        records = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, content in records.items():
            file.writestr(name, data if name.endswith("data.pkl") else content)


def test_mapped_tensors_are_the_callers_own(tmp_path):
    """Writing to what was read does not change the file."""
    folder = save_engine(tmp_path / "folder")
    held = open_checkpoint(folder).parameters["layer.0"]
    before = (folder / MODEL_STATES).read_bytes()
    held.buffers[0].fill_(1)
    assert (folder / MODEL_STATES).read_bytes() == before


# ------------------------------------------------------------------------------------------ names that lead elsewhere


@pytest.fixture
def elsewhere(tmp_path):
    """A file that a name might lead to; beside ``source``."""
    save_file({"layer.0": torch.ones(8, 3)}, tmp_path / "secret.safetensors")
    (tmp_path / "source" / "inner").mkdir()
    save_file({"layer.0": torch.ones(8, 3)}, tmp_path / "source" / "inner" / "deep.safetensors")
    return tmp_path / "secret.safetensors"


NAMES = ["../secret.safetensors", "ABSOLUTE", "inner/deep.safetensors", "./model.safetensors",
         "inner/../model.safetensors", "", ".", "..", "no such file", "inner", "a\0b", "x" * 300,
         "\ud800"]  # yapf: disable


@pytest.mark.parametrize("name", NAMES)
def test_an_index_whose_names_lead_out_of_the_folder_is_refused(source, elsewhere, name):
    name = str(elsewhere) if name == "ABSOLUTE" else name
    (source / INDEX).write_text(json.dumps({"weight_map": {"layer.0": name, "norm": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match="lists the file|too long"):
        open_checkpoint(source)


@pytest.mark.parametrize("name", NAMES)
def test_maps_whose_files_lead_out_of_the_folder_are_refused(source, shards, elsewhere, name):
    name = str(elsewhere) if name == "ABSOLUTE" else name
    stored = json.loads((shards / MAPS).read_text())
    stored["files"]["1"] = name
    (shards / "inner").mkdir()
    (shards / MAPS).write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match="lists the file|too long"):
        open_checkpoint(shards)


@pytest.mark.parametrize("name",
                         ["..", "../source", "ABSOLUTE", "source/inner", ".", "", "no such", "a\0b", "x" * 300])
def test_a_latest_that_leads_out_of_the_folder_is_refused(source, elsewhere, name, tmp_path):
    folder = tmp_path / "steps"
    folder.mkdir()
    (folder / "step1").symlink_to(source)
    (folder / "latest").write_text("step1")
    assert "layer.0" in open_checkpoint(folder).parameters
    (folder / "latest").write_text(str(source) if name == "ABSOLUTE" else name)
    with pytest.raises(CheckpointError, match="names the step|too long"):
        open_checkpoint(folder)


def test_files_that_are_links_are_read(source, tmp_path):
    """As in the cache of the Hugging Face hub."""
    linked = tmp_path / "snapshot"
    linked.mkdir()
    (linked / "model.safetensors").symlink_to(source / "model.safetensors")
    assert_same({name: held.buffers[0] for name, held in open_checkpoint(linked).parameters.items()}, tensors())


# ------------------------------------------------------------------------------------------ broken headers and JSON


def header_of(content):
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8:8 + size]), content[8 + size:]


def with_header(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _changed(change):
    """A file whose header of three tensors is changed."""

    def damage(content):
        header, data = header_of(content)
        change(header)
        return with_header(header, data)

    return damage


DAMAGES = {
    "nothing at all":
    lambda content: b"",
    "seven bytes":
    lambda content: content[:7],
    "the header's length alone":
    lambda content: content[:8],
    "a header without its end":
    lambda content: content[:40],
    "data without their end":
    lambda content: content[:-1],
    "one byte more":
    lambda content: content + b"\0",
    "a header of 2^63 bytes":
    lambda content: (2**63).to_bytes(8, "little") + content[8:],
    "a header of 2^64 - 1 bytes":
    lambda content: b"\xff" * 8 + content[8:],
    "a header of the whole file":
    lambda content: (len(content) - 8).to_bytes(8, "little") + content[8:],
    "a header that is no JSON":
    lambda content: with_header(b"{]", b""),
    "a header that is a list":
    lambda content: with_header([], b""),
    "a header of deep lists":
    lambda content: with_header(b"[" * 100_000, b""),
    "a dtype that is none":
    _changed(lambda header: header["norm"].update(dtype="F7")),
    "a wider dtype":
    _changed(lambda header: header["norm"].update(dtype="F64")),
    "a larger shape":
    _changed(lambda header: header["norm"].update(shape=[6])),
    "a huge shape":
    _changed(lambda header: header["norm"].update(shape=[2**62, 2**62])),
    "a negative shape":
    _changed(lambda header: header["norm"].update(shape=[-5])),
    "an end beyond the file":
    _changed(lambda header: header["norm"].update(data_offsets=[0, 10**12])),
    "an end before the start":
    _changed(lambda header: header["norm"].update(data_offsets=[10, 0])),
    "two tensors in one place":
    _changed(lambda header: header["norm"].update(data_offsets=header["layer.2"]["data_offsets"])),
    "a tensor that is gone":
    _changed(lambda header: header.pop("layer.0")),
    "no offsets":
    _changed(lambda header: header["norm"].pop("data_offsets")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_safetensors_file_is_named(source, damage, tmp_path, capsys):
    path = source / "model.safetensors"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(CheckpointError, match="model.safetensors: is no whole safetensors file"):
        open_checkpoint(source)
    code, _, error = run(capsys, "reshard", source, tmp_path / "out", "--to", "hf")
    assert code == 2 and "model.safetensors" in error and [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("text", [
    "", "{", "[]", "3", "null", '"x"', "{}", "[" * 100_000, '{"weight_map": 3}', '{"weight_map": []}',
    '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ["model.safetensors"]}}', "\ud800", "9" * 5000
])
def test_a_broken_index_is_named(source, text):
    (source / INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=INDEX):
        open_checkpoint(source)


def test_an_index_of_a_gigabyte_is_not_read(source):
    with open(source / INDEX, "wb") as file:
        # It has no blocks on disk.
        file.truncate((1 << 30) + 1)
    with pytest.raises(CheckpointError, match="has 1073741825 bytes"):
        open_checkpoint(source)


def _set(*path, value):

    def change(stored):
        for key in path[:-1]:
            stored = stored[key]
        stored[path[-1]] = value

    return change


@pytest.mark.parametrize("change", [
    _set("version", value=2),
    _set("version", value="1"),
    _set("params", value=[]),
    _set("params", "norm", value=None),
    _set("params", "norm", "ranks", "0", "shard_shape", value=[2**61]),
    _set("params", "other", value=replicated_map((2, ), 1).to_dict()),
    _set("params", "norm", value=replicated_map((5, ), 3).to_dict()),
    _set("params", "norm", value=contiguous_split_map((10, ), [5, 5], 0).to_dict() | {"pieces_by_rank": {}}),
    _set("params", "layer.1", value=replicated_map((8, 2, 3), 2).to_dict()),
    _set("files", value=[]),
    _set("files", value={"first": "model-tp-00000-of-00002.safetensors"}),
    _set("files", value={"0": 3}),
    _set("files", value={}),
    _set("rows", value=[]),
    _set("rows", value={"norm": "norm"}),
    _set("rows", value={"norm": ["norm", -1]}),
    _set("rows", value={"norm": ["norm", 1]}),
    _set("rows", value={"norm": ["norm", math.inf]}),
    _set("rows", value={"norm": [["norm"], 0]}),
    _set("rows", value={"norm": ["layer.0", 0]}),
    _set("rows", value={"norm": ["nowhere", 0]}),
    _set("rows", value={"norm": []}),
    _set("rows", value={"steps": ["steps", 1]}),
    _set("rows", value={"layer.0": ["layer.0", 1]}),
    _set("rows", value={"layer.0": ["layer.0", 2**70]}),
])
def test_maps_that_contradict_their_files_are_refused(shards, change):
    stored = json.loads((shards / MAPS).read_text())
    change(stored)
    (shards / MAPS).write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match="shards"):
        open_checkpoint(shards)


def test_maps_that_do_not_cover_their_parameter_are_refused_before_anything_is_written(shards, tmp_path, capsys):
    stored = json.loads((shards / MAPS).read_text())
    stored["params"]["norm"]["logical_shape"] = [6]
    (shards / MAPS).write_text(json.dumps(stored))
    code, _, error = run(capsys, "reshard", shards, tmp_path / "out", "--to", "hf")
    assert code == 2 and "norm" in error
    assert {path.name for path in tmp_path.iterdir()} == {"source", "shards"}


def test_ranks_with_other_dtypes_are_refused(shards):
    path = shards / "model-tp-00001-of-00002.safetensors"
    content = load_file(path)
    save_file(content | {"norm": content["norm"].float()}, path)
    with pytest.raises(CheckpointError, match="shards of 'norm' are of.*float16.*float32"):
        open_checkpoint(shards)


def test_one_tensor_in_two_files_is_refused(tmp_path):
    folder = save_folder(tmp_path / "twice", one={"w": torch.ones(1), "a": torch.ones(1)}, two={"w": torch.ones(1)})
    with pytest.raises(CheckpointError, match="two.safetensors: has 'w', which another file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("files", [[], ["readme.md"], ["pytorch_model.bin"], ["optimizer.pt"]])
def test_a_folder_that_is_no_checkpoint_is_refused(files, tmp_path, capsys):
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match="is no checkpoint that this library reads"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        open_checkpoint(tmp_path / "nowhere")
    assert run(capsys, "inspect", tmp_path)[0] == 2


@pytest.mark.parametrize("file", ["layer_00-model_00-model_states.pt", "layer_0_expert_1_mp_rank_01_model_states.pt",
                                  "layer_0_expert_1_mp_rank_00_model_states.pt"])  # yapf: disable
def test_pipeline_stages_and_unknown_experts_are_sent_to_universal_checkpoints(file, tmp_path):
    folder = save_engine(tmp_path / "folder")
    torch.save({}, folder / file)
    with pytest.raises(CheckpointError, match=r"(pipeline stage|AutoEP has not placed).*ds_to_universal"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800b"])
def test_names_that_safetensors_cannot_store_are_refused(name, tmp_path, capsys):
    source = save_engine(tmp_path / "engine", {"module": {name: torch.ones(2)}})
    code, _, error = run(capsys, "reshard", source, tmp_path / "out", "--to", "hf")
    assert code == 2 and "cannot store a tensor of the name" in error
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    assert run(capsys, "inspect", source)[0] == 0


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path):
    for number, weight_map in enumerate([{
            "a": "one.safetensors",
            "b": "one.safetensors"
    }, {
            "a": "one.safetensors",
            "b": "two.safetensors"
    }, {
            "b": "two.safetensors"
    }]):
        folder = save_folder(tmp_path / str(number), one={"a": torch.ones(2)}, two={"b": torch.ones(3)})
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        if number == 1:
            assert set(open_checkpoint(folder).parameters) == {"a", "b"}
        elif number == 0:
            with pytest.raises(CheckpointError, match="one.safetensors: has no 'b', which .* says is in it"):
                open_checkpoint(folder)
        else:
            # A file that the index does not name is not read, as with Hugging Face.
            assert set(open_checkpoint(folder).parameters) == {"b"}
    folder = save_folder(tmp_path / "more", one={"a": torch.ones(2), "b": torch.ones(3)})
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match="has 'b', which .* does not say of it"):
        open_checkpoint(folder)


def test_a_tensor_that_the_maps_of_ranks_leave_out_is_refused(shards):
    content = json.loads((shards / MAPS).read_text())
    del content["params"]["layer.1"]
    (shards / MAPS).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="has 'layer.1', of which affine_maps.json says nothing"):
        open_checkpoint(shards)


@pytest.mark.parametrize("row", [["q", 1.0], "q0", ["q"], [3, 0]])
def test_places_of_fused_tensors_must_be_such(row, shards):
    content = json.loads((shards / MAPS).read_text())
    (shards / MAPS).write_text(json.dumps(content | {"rows": {"layer.0": row}}))
    with pytest.raises(CheckpointError, match="affine_maps.json"):
        open_checkpoint(shards)


def test_flat_groups_that_have_more_than_the_parameters_are_refused(tmp_path):
    for groups in ([torch.ones(4)], [torch.ones(3), torch.ones(2)]):
        optimizer = OPTIMIZER | {"fp32_flat_groups": groups}
        save_zero3(tmp_path / "run", STATES, optimizer, 0)
        save_zero3(tmp_path / "other", STATES, optimizer, 1)
        name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        (tmp_path / "other" / name).rename(tmp_path / "run" / name)
        with pytest.raises(CheckpointError, match="have more than the parameters of param_shapes take"):
            open_checkpoint(tmp_path / "run")


ODD_TENSORS = {
    "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.ones(3, device="meta"),
    "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
    "repeated": torch.ones(1).expand(2**36),
}


@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_tensors_that_are_no_plain_values_are_refused(kind, tmp_path, capsys):
    source = save_engine(tmp_path / "engine", {"module": {"w": ODD_TENSORS[kind]}})
    for arguments in (["verify", source, source], ["inspect", source]):
        code, _, error = run(capsys, *arguments)
        assert code == 2 and len(error.splitlines()) == 1


@pytest.mark.parametrize("name", [5, None, b"x", ("t", )])
def test_names_that_are_no_strings_are_refused(name, tmp_path, capsys):
    source = save_engine(tmp_path / "engine", {"module": {name: torch.ones(3)}})
    code, _, error = run(capsys, "inspect", source)
    assert code == 2 and len(error.splitlines()) == 1


def test_a_value_that_is_nested_without_end_is_refused(tmp_path):
    nested = ()
    for _ in range(50):
        nested = (nested, nested)
    for value in (nested, [nested], {"x": nested}):
        save_zero3(tmp_path / "run", STATES, OPTIMIZER | {"partition_count": value})
        with pytest.raises(CheckpointError, match="partition_count is a value of type"):
            open_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("name", ["model.safetensors", MODEL_STATES])
def test_a_pipe_is_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="is no regular file"):
        open_checkpoint(tmp_path)


def test_a_step_whose_name_is_a_whole_disk_is_refused(tmp_path):
    with open(tmp_path / "latest", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="names the step"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.complex64])
def test_rarer_dtypes_are_written(dtype, tmp_path, capsys):
    source = save_folder(tmp_path / "source", model={"w": torch.arange(6).to(dtype)})
    assert run(capsys, "reshard", source, tmp_path / "out", "--to", "hf")[0] == 0
    assert_same(read_files(tmp_path / "out"), {"w": torch.arange(6).to(dtype)})


def test_verify_says_what_it_did_not_compare(tmp_path, capsys):
    states = STATES | {"module": STATES["module"] | {"lost": torch.empty(0)}}
    save_zero3(tmp_path / "run", states, OPTIMIZER)
    code, said, _ = run(capsys, "verify", tmp_path / "run", tmp_path / "run")
    assert code == 0 and said.count(f"not compared: lost of {tmp_path / 'run'}: ") == 2


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [None, True, 1.5, "4", [], {}])
def test_a_configuration_of_odd_values_is_refused(key, value, tmp_path, capsys):
    source = save_folder(tmp_path / "source")
    config = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 35, **config, key: value}))
    code, _, error = run(capsys, "reshard", source, tmp_path / "out", "--to", "tp-2")
    assert code == 2 and len(error.splitlines()) == 1


# Fields of the files of a run, and values that no field has.
STATES = {
    "module": {"w": torch.ones(3, 2), "frozen": torch.ones(2), "table": torch.ones(2)},
    "param_shapes": [{"w": torch.Size([3, 2])}],
    "frozen_param_shapes": {"frozen": torch.Size([2])},
    "frozen_param_fragments": {"frozen": torch.ones(1)},
    "buffer_names": ["table"],
    "shared_params": {"tied": "w"},
    "universal_checkpoint_info": {"affine_map": None},
}  # yapf: disable
OPTIMIZER = {"zero_stage": 3, "partition_count": 2, "fp32_flat_groups": [torch.ones(3)]}
JUNK = (True, -1, 1.5, math.inf, 2**70, "x", b"x", [1], [None], [{"w": "x"}], [{"w": [torch.ones(2)]}], {"w": 3},
        {"w": None}, {"w": ["x"]}, {1: 2}, torch.ones(3), torch.ones(()), (1, 2), [torch.ones(2, dtype=torch.int8)],
        [{}], [[1]])  # yapf: disable


def save_zero3(folder, states, optimizer, data_rank=0):
    """A run over two ranks, of which one's files are these."""
    folder.mkdir(exist_ok=True)
    for rank in range(2):
        name, given = f"zero_pp_rank_{rank}_mp_rank_00_", rank == data_rank
        torch.save(states if given else STATES, folder / f"{name}model_states.pt")
        torch.save({"optimizer_state_dict": optimizer if given else OPTIMIZER}, folder / f"{name}optim_states.pt")
    return folder


def test_the_run_that_is_damaged_below_is_whole(tmp_path):
    checkpoint = open_checkpoint(save_zero3(tmp_path / "run", STATES, OPTIMIZER))
    assert checkpoint.kind == "ZeRO-3 over 2"
    assert set(checkpoint.parameters) == {"w", "frozen", "table", "tied"}


@pytest.mark.parametrize("data_rank", [0, 1])
@pytest.mark.parametrize("field", [*STATES, *OPTIMIZER])
def test_fields_of_another_kind_are_refused_or_not_needed(field, data_rank, tmp_path):
    """Only one kind of error comes out of any of them."""
    outcomes = set()
    for value in JUNK:
        states, optimizer = ({
            **STATES, field: value
        }, OPTIMIZER) if field in STATES else (STATES, {
            **OPTIMIZER, field: value
        })
        outcomes.add(outcome(save_zero3(tmp_path / "run", states, optimizer, data_rank)))
    assert outcomes <= {"read", "refused"}


def outcome(folder):
    """Opens a folder and looks at all of its tensors."""
    try:
        parameters = open_checkpoint(folder).parameters
    except CheckpointError:
        return "refused"
    for held in parameters.values():
        assert held.buffers.keys() == held.layout.shard_shapes.keys()
        for location, shape in held.layout.shard_shapes.items():
            buffer = held.buffers[location]
            assert buffer.numel() == math.prod(shape) and buffer.dtype == held.dtype
            bits(buffer)
    return "read"


# ------------------------------------------------------------------------------------------ fuzzing


def _edits():
    """Changes of bytes: overwritten, cut, repeated, in the beginning more often than elsewhere."""
    where = st.integers(0, 200) | st.integers(0, 20_000)
    return st.lists(st.tuples(st.sampled_from(["overwrite", "cut", "insert", "truncate"]), where,
                              st.binary(min_size=1, max_size=9)),
                    min_size=1,
                    max_size=4)


def edit(content, edits):
    for kind, where, data in edits:
        where = where % (len(content) + 1)
        content = {
            "overwrite": content[:where] + data + content[where + len(data):],
            "cut": content[:where] + content[where + len(data):],
            "insert": content[:where] + data + content[where:],
            "truncate": content[:where],
        }[kind]
    return content


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Whole checkpoints by kind, and for each file of them what is in it."""
    root = tmp_path_factory.mktemp("seeds")
    save_folder(root / "safetensors")
    (root / "safetensors" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors(),
                                                                                      "model.safetensors")}))
    processes.reshard_over_ranks(root / "safetensors", root / "ranks", 2)
    save_engine(root / "engine")
    save_zero3(root / "zero3", STATES, OPTIMIZER)
    (root / "universal" / "zero" / "w").mkdir(parents=True)
    torch.save({"param": torch.ones(2, 2)}, root / "universal" / "zero" / "w" / "fp32.pt")
    files = [path for path in root.rglob("*") if path.is_file()]
    return root, {path: path.read_bytes() for path in sorted(files)}


# All fuzzing here takes about 15 seconds.
@settings(max_examples=900)
@given(data=st.data())
def test_changed_bytes_are_refused_or_harmless(seeds, data):
    root, files = seeds
    path = data.draw(st.sampled_from(sorted(files)))
    path.write_bytes(edit(files[path], data.draw(_edits())))
    try:
        assert outcome(root / path.relative_to(root).parts[0]) in ("read", "refused")
    finally:
        path.write_bytes(files[path])


JSON = st.recursive(st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.integers(-1, 9) | st.floats()
                    | st.text(max_size=3)
                    | st.sampled_from(["norm", "layer.0", "model-tp-00000-of-00002.safetensors", "model.safetensors"]),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
                        ["0", "1", "norm", "steps", "layer.0", "shape", "scale"]) | st.text(max_size=2),
                                                                                inner,
                                                                                max_size=3),
                    max_leaves=8)


@settings(max_examples=500)
@given(data=st.data())
def test_any_json_in_the_place_of_another_is_refused_or_harmless(seeds, data):
    root, files = seeds
    path = root / data.draw(st.sampled_from([f"ranks/{MAPS}", f"safetensors/{INDEX}"]))
    content = json.loads(files[path])
    holder, key = {"": content}, ""
    while isinstance(holder[key], (dict, list)) and holder[key] and data.draw(st.integers(0, 4)):
        holder = holder[key]
        key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
    holder[key] = data.draw(JSON)
    path.write_text(json.dumps(holder[key] if key == "" else content))
    try:
        assert outcome(path.parent) in ("read", "refused")
    finally:
        path.write_bytes(files[path])


@settings(max_examples=300)
@given(data=st.data())
def test_any_pickle_is_refused_or_harmless(seeds, data):
    """The beginning of a real one, or none of it, and then anything."""
    root, files = seeds
    path = root / data.draw(
        st.sampled_from([f"engine/{MODEL_STATES}", "zero3/zero_pp_rank_1_mp_rank_00_optim_states.pt"]))
    path.write_bytes(files[path])
    with zipfile.ZipFile(path) as file:
        real, = (file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
    _replace_pickle(path, real[:data.draw(st.integers(0, len(real)))] + data.draw(st.binary(max_size=30)))
    try:
        assert outcome(path.parent) in ("read", "refused")
    finally:
        path.write_bytes(files[path])


@given(st.binary(max_size=40))
def test_any_latest_is_refused_or_names_a_step(seeds, text):
    root, _ = seeds
    (root / "latest").write_bytes(text)
    try:
        assert outcome(root) == "refused" or (root / text.decode(errors="replace").strip()).is_dir()
    finally:
        (root / "latest").unlink()


# ------------------------------------------------------------------------------------------ layouts on disk


def dtypes_of(shapes, dtype=torch.float32):
    return dict.fromkeys(shapes, dtype)


@pytest.mark.parametrize("limit, groups", [
    (1, ["a", "b", "c", "empty", "d"]),
    (12, ["a", "b", "c", "empty", "d"]),
    (40, ["a b", "c", "empty", "d"]),
    (47, ["a b", "c", "empty", "d"]),
    (48, ["a b", "c empty", "d"]),
    (88, ["a b c empty", "d"]),
    (10**9, ["a b c empty d"]),
])
def test_files_are_cut_by_size(limit, groups):
    shapes = {"a": (3, ), "b": (7, ), "c": (3, 4), "empty": (0, 4), "d": (2, 2, 5)}
    layout = whole_layout(shapes, dtypes_of(shapes), limit)
    assert [" ".join(file.tensors) for file in layout.files] == groups
    assert layout.numbytes == 4 * (3 + 7 + 12 + 20)
    for file in layout.files:
        assert file.location == 0 and (file.numbytes <= limit
                                       or sum(math.prod(s) > 0 for _, s in file.tensors.values()) == 1)
    names = [file.name for file in layout.files]
    if len(names) == 1:
        assert names == ["model.safetensors"] and layout.indices == {}
    else:
        assert names == [f"model-{number + 1:05d}-of-{len(names):05d}.safetensors" for number in range(len(names))]
        index = layout.indices[INDEX]
        assert index["metadata"] == {"total_size": layout.numbytes}
        assert index["weight_map"] == {name: file.name for file in layout.files for name in file.tensors}


@pytest.mark.parametrize("axis, message", [(0, "axis 0 over 2"), (2, "axis 2"), (-3, "axis -3")])
def test_axes_that_cannot_be_cut_evenly_are_refused(axis, message):
    with pytest.raises(ValueError, match=rf"'w' of shape \(3, 4\).*{message}"):
        split_layout({"w": (3, 4)}, dtypes_of(["w"]), 2, [("w", axis)])


@pytest.mark.parametrize("axis", [1, -1])
def test_the_first_pattern_says_how_a_parameter_is_cut(axis):
    shapes = {"in.w": (3, 4), "out.w": (4, 3), "norm": (3, )}
    layout = split_layout(shapes, dtypes_of(shapes), 2, [("^in", axis), ("w$", 0), ("in", 0)])
    assert [(file.location, file.tensors["in.w"][1], file.tensors["out.w"][1], file.tensors["norm"][1])
            for file in layout.files] == [(0, (3, 2), (2, 3), (3, )), (1, (3, 2), (2, 3), (3, ))]
    assert shard_element_ids(layout.places["in.w"].layout)[1].tolist() == [2, 3, 6, 7, 10, 11]


SMALL = DecoderModel(hidden_size=4,
                     intermediate_size=6,
                     num_hidden_layers=1,
                     num_attention_heads=4,
                     num_key_value_heads=2,
                     head_dim=2,
                     vocab_size=5)


def test_fused_parameters_are_rows_of_one_tensor():
    server = server_layout(SMALL, 2)
    layout = server_disk_layout(server, 2, dtypes_of(server.parts, torch.bfloat16))
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    # On each of two ranks 2 query heads, 1 key head and 1 value head of 2 rows; and 3 rows of gate and of up.
    places = {name: (place.tensor, place.start) for name, place in layout.places.items()}
    assert {name: places[f"{attention}.{name}_proj.weight"] for name in "qkv"} == {
        "q": (f"{attention}.qkv_proj.weight", 0), "k": (f"{attention}.qkv_proj.weight", 4),
        "v": (f"{attention}.qkv_proj.weight", 6)
    }  # yapf: disable
    assert places[f"{mlp}.up_proj.weight"] == (f"{mlp}.gate_up_proj.weight", 3)
    assert layout.files[1].tensors[f"{attention}.qkv_proj.weight"] == (torch.bfloat16, (8, 4))
    assert layout.files[0].tensors["lm_head.weight"] == (torch.bfloat16, (32, 4))
    assert layout.indices[MAPS]["rows"][f"{attention}.k_proj.weight"] == [f"{attention}.qkv_proj.weight", 4]
    assert layout.indices[MAPS]["rows"].keys() == {
        *(f"{attention}.{name}_proj.weight" for name in "qkv"), f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"
    }


def test_fused_parameters_of_two_dtypes_are_refused():
    server = server_layout(SMALL, 2)
    dtypes = dtypes_of(server.parts) | {"model.layers.0.self_attn.v_proj.weight": torch.float16}
    with pytest.raises(ValueError, match="v_proj.weight' is torch.float16, but .*qkv_proj.weight'.*torch.float32"):
        server_disk_layout(server, 2, dtypes)


# ------------------------------------------------------------------------------------------ written files


@pytest.mark.parametrize("dtype", sorted(safetensors_files._NAMES, key=str), ids=str)
def test_the_format_s_own_reader_reads_every_dtype(dtype, tmp_path):
    content = {
        "matrix": torch.arange(12).reshape(3, 4).to(dtype),
        "odd": torch.arange(5).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(2, 0, 3).to(dtype),
        "a name of \u00fcnicode": torch.ones(1).to(dtype)
    }
    path = tmp_path / "made.safetensors"
    with new_file(path, {name: (dtype, tuple(tensor.shape)) for name, tensor in content.items()}) as made:
        for name, tensor in content.items():
            assert not bits(made[name]).strip(b"\0")
            made[name].copy_(tensor)
    assert_same(load_file(path), content)


def test_dtypes_of_all_widths_share_a_file(tmp_path):
    path = tmp_path / "made.safetensors"
    with new_file(path, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors().items()}) as made:
        for name, tensor in tensors().items():
            assert made[name].data_ptr() % tensor.element_size() == 0
            made[name].copy_(tensor)
    assert_same(load_file(path), tensors())
    assert header_of(path.read_bytes())[0]["__metadata__"] == {"format": "pt"}


def test_a_file_without_tensors_is_one(tmp_path):
    with new_file(tmp_path / "made.safetensors", {}) as made:
        assert made == {}
    assert load_file(tmp_path / "made.safetensors") == {}


def test_a_dtype_that_the_format_lacks_and_a_file_that_is_there_are_refused(tmp_path):
    path = tmp_path / "made.safetensors"
    with pytest.raises(ValueError, match=r"no dtype for w \(torch.complex128\)"):
        with new_file(path, {"w": (torch.complex128, (1, ))}):
            pass
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(OSError, match="made.safetensors"):
        with new_file(path, {}):
            pass
    assert path.read_text() == "mine"


def test_resharded_files_hold_what_was_there(source, tmp_path):
    """Whole, over ranks, and whole again."""
    assert main(["reshard",
                 str(source),
                 str(tmp_path / "tp"), "--to", "tp-4", "--split", r"layer.*=0", "--quiet"]) == 0
    for rank in range(4):
        found = load_file(tmp_path / "tp" / f"model-tp-{rank:05d}-of-00004.safetensors")
        assert_same(
            found, {
                name: tensor[2 * rank:2 * rank + 2] if name.startswith("layer") else tensor
                for name, tensor in tensors().items()
            })
    assert main(["reshard",
                 str(tmp_path / "tp"),
                 str(tmp_path / "hf"), "--to", "hf", "--file-size", "64", "--quiet"]) == 0
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    assert_same(read_files(tmp_path / "hf"), tensors())


@pytest.fixture(scope="module")
def quarter(tmp_path_factory):
    """256 MiB, in tensors of 32 MiB."""
    source = tmp_path_factory.mktemp("quarter") / "source"
    source.mkdir()
    with new_file(source / "model.safetensors", {f"w{number}": (torch.float32, (2048, 4096))
                                                 for number in range(8)}) as made:
        for number, tensor in enumerate(made.values()):
            tensor.copy_(torch.arange(4096) + number)
    return source


def growth(source, destination, kind, *options):
    (code,
     grown), = run_processes(1, processes.growth,
                             ["reshard", str(source), str(destination), "--quiet", *options], kind)
    assert code == 0
    last = load_file(max(destination.glob("*.safetensors")))["w7"]
    assert torch.equal(last[-1], (torch.arange(4096) + 7).to(last.dtype))
    return grown


@pytest.mark.parametrize("options", [["--to", "tp-2", "--split", "w=0"], ["--to", "hf", "--dtype", "bfloat16"]])
def test_memory_does_not_grow_with_the_model(quarter, options, tmp_path):
    """Less than one tensor is ever in private memory."""
    assert growth(quarter, tmp_path / "out", "RssAnon", *options) < 32 * MIB


def test_memory_of_mapped_files_is_bounded_by_an_option(quarter, tmp_path):
    options = ["--to", "hf", "--workers", "1"]
    # Source and target of the tensor that is being copied come on top.
    assert growth(quarter, tmp_path / "bounded", "VmRSS", *options, "--memory", "64MB") < (64 + 2 * 32 + 32) * MIB
    assert growth(quarter, tmp_path / "unbounded", "VmRSS", *options) > 400 * MIB


def reshard_with(limits, source, destination):
    """Exit code and errors of a run over 100 ranks that may have so many files open: at first, and at most."""
    return subprocess.run([
        "bash", "-c", f'ulimit -Sn {limits[0]}; ulimit -Hn {limits[1]}; exec "$@"', "bash", sys.executable, "-m",
        "ds_affine", "reshard", source, destination, "--to", "tp-100", "--split", "w=0", "--quiet"
    ], capture_output=True, text=True, timeout=120)  # yapf: disable


def test_more_files_are_written_than_may_be_open_at_first(tmp_path):
    source = save_folder(tmp_path / "source", model={"w": torch.arange(300.)})
    assert reshard_with((100, 1000), source, tmp_path / "out").returncode == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 100
    refused = reshard_with((100, 200), source, tmp_path / "refused")
    assert refused.returncode == 2 and re.search(r"of which 200 are allowed; allow more by ulimit -Hn 2\d\d$",
                                                 refused.stderr)
    assert not list(tmp_path.glob("*refused*"))


@pytest.mark.parametrize("options, words", [
    (["hf", "--fused"], "--fused means nothing beside --to hf"),
    (["hf", "--config", "c.json"], "--config means nothing beside --to hf"),
    (["hf", "--split", "w=0"], "--split means nothing beside --to hf"),
    (["tp-2", "--split", "w=0", "--fused"], "--fused means nothing beside --split"),
    (["tp-2", "--split", "w=0", "--config", "c.json"], "--config means nothing beside --split"),
    (["tp-2", "--split", "w=0", "--file-size", "1GB"], "--file-size means nothing beside --to tp-2"),
    (["tp-2", "--split", "nothing=0"], "no parameter has 'nothing' in its name"),
])
def test_options_that_would_do_nothing_are_refused(options, words, tmp_path, capsys):
    source = save_folder(tmp_path / "source", model={"w": torch.ones(4)})
    code, said, error = run(capsys, "reshard", source, tmp_path / "out", "--dry-run", "--to", *options)
    assert (code, said) == (2, "") and words in error and not (tmp_path / "out").exists()


def decoder(tmp_path, **more):
    """A folder with a small decoder's parameters and some more, its configuration, and what is in it."""
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 34
    }
    parts = server_layout(DecoderModel.from_config(config), 2).parts
    content = {name: torch.randn(part.target_map.logical_shape) for name, part in parts.items()}
    folder = save_engine(tmp_path / "model", {"module": content | more})
    (folder / "config.json").write_text(json.dumps(config))
    return folder, content


def test_a_configuration_of_another_model_is_refused(tmp_path, capsys):
    folder, content = decoder(tmp_path)
    torch.save({"module": content | {"lm_head.weight": torch.ones(33, 16)}}, folder / MODEL_STATES)
    code, said, error = run(capsys, "reshard", folder, tmp_path / "out", "--dry-run", "--to", "tp-2")
    assert (code, said) == (2, "")
    assert "'lm_head.weight' has shape (33, 16), but" in error and "where it has (34, 16)" in error


@pytest.mark.parametrize("options", [[], ["--fused"]])
def test_parameters_that_the_configuration_does_not_know_are_said_to_be_left_out(options, tmp_path, capsys):
    folder, content = decoder(tmp_path, extra=torch.ones(3))
    code, said, _ = run(capsys, "reshard", folder, tmp_path / "out", "--to", "tp-2", *options)
    assert code == 0 and "left out: extra: a model of " in said
    assert set(open_checkpoint(tmp_path / "out").parameters) == set(content)


def test_a_head_that_is_tied_here_is_written_where_the_configuration_has_its_own(tmp_path):
    folder, content = decoder(tmp_path)
    content["lm_head.weight"] = content["model.embed_tokens.weight"]
    torch.save({"module": content}, folder / MODEL_STATES)
    assert open_checkpoint(folder).parameters["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert main(["reshard", str(folder), str(tmp_path / "out"), "--to", "tp-2", "--quiet"]) == 0
    assert main(["verify", str(folder), str(tmp_path / "out")]) == 0
    assert set(open_checkpoint(tmp_path / "out").parameters) == set(content)


@pytest.mark.parametrize("dtype, code", [("bfloat16", 0), ("float32", 1), (None, 1)])
def test_verify_compares_as_stored(dtype, code, tmp_path, capsys):
    content = {"w": torch.randn(40, 30), "steps": torch.arange(5)}
    source = save_folder(tmp_path / "source", model=content)
    assert run(capsys, "reshard", source, tmp_path / "out", "--to", "hf", "--dtype", "bfloat16")[0] == 0
    options = ["--dtype", dtype] if dtype else []
    assert run(capsys, "verify", source, tmp_path / "out", *options)[0] == code
    assert run(capsys, "verify", tmp_path / "out", source, *options)[0] == code


def test_what_was_opened_needs_no_gradient_and_prints_no_values(tmp_path):
    checkpoint = open_checkpoint(save_engine(tmp_path / "folder"))
    assert not any(tensor.requires_grad for held in checkpoint.parameters.values() for tensor in held.buffers.values())
    assert len(repr(checkpoint)) < 100 and "parameters and buffers" in repr(checkpoint)
    assert "tensor(" not in "".join(map(repr, checkpoint.parameters.values()))


# ------------------------------------------------------------------------------------------ runs that do not end


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Tensors of 4 MB that are written into five files."""
    content = {f"w{number}": torch.randn(100, 1000) for number in range(10)}
    return save_folder(tmp_path_factory.mktemp("large") / "source", model=content), content


def assert_nothing_or_all(destination, content):
    """Whether it is there; and if so, it is whole."""
    if destination.exists():
        assert len(list(destination.glob("*.safetensors"))) > 1 and (destination / INDEX).exists()
        assert_same(read_files(destination), content)
        json.loads((destination / INDEX).read_text())
    return destination.exists()


def assert_next_run_succeeds(source, destination, content):
    if not destination.exists():
        processes.reshard(source, destination)
    assert assert_nothing_or_all(destination, content)
    assert [path.name for path in destination.parent.iterdir()] == [destination.name]


def test_killed_before_any_step_it_leaves_all_or_nothing(large, tmp_path):
    """At every moment at which it makes, maps, renames or removes something, or has copied a parameter."""
    source, content = large
    count, = run_processes(1, processes.killed_before_each_step, source, tmp_path)
    assert count > 20
    there = [assert_nothing_or_all(tmp_path / str(number) / "out", content) for number in range(count + 1)]
    # Once its name is there it stays.
    assert there == sorted(there) and there[count] and not there[count // 2]
    for number in range(0, count, 3):
        assert_next_run_succeeds(source, tmp_path / str(number) / "out", content)


def test_killed_at_random_moments_it_leaves_all_or_nothing(large, tmp_path):
    source, content = large
    moments = random.Random(6)
    run_processes(1, processes.killed_after, source, tmp_path, [(part + moments.random()) / 20 for part in range(20)])
    assert assert_nothing_or_all(tmp_path / "whole" / "out", content)
    there = [assert_nothing_or_all(tmp_path / str(number) / "out", content) for number in range(20)]
    assert not all(there)
    for number in range(20):
        assert_next_run_succeeds(source, tmp_path / str(number) / "out", content)


def test_what_a_killed_run_left_is_removed(source, tmp_path):
    left = tmp_path / ".out.unfinished"
    left.mkdir()
    (left / "model-00001-of-00009.safetensors").write_bytes(b"half")
    (left / "model.safetensors").write_bytes(b"half")
    processes.reshard(source, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    assert_same(read_files(tmp_path / "out"), tensors())


@pytest.mark.parametrize("kind", ["file", "folder", "link", "link to a folder"])
def test_what_no_run_left_is_not_touched(kind, source, tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("all of it")
    (mine / "model.safetensors").write_text("and a model")
    left = tmp_path / ".out.unfinished"
    if kind == "link to a folder":
        left.symlink_to(mine)
    else:
        left.mkdir()
        (left / "model.safetensors").write_text("half")
        if kind == "file":
            (left / "notes").write_text("x")
        elif kind == "folder":
            (left / "affine_maps.json").mkdir()
        else:
            (left / "model-00001-of-00002.safetensors").symlink_to(mine / "thesis.txt")
    code, _, error = run(capsys, "reshard", source, tmp_path / "out", "--to", "hf")
    assert code == 2 and ".out.unfinished" in error and not (tmp_path / "out").exists()
    assert {path.name for path in mine.iterdir()} == {"thesis.txt", "model.safetensors"}
    assert (mine / "thesis.txt").read_text() == "all of it" and len(list(left.iterdir())) == 2


def test_a_destination_that_is_a_dangling_link_is_refused(source, tmp_path, capsys):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    code, said, error = run(capsys, "reshard", source, tmp_path / "out", "--to", "hf")
    assert (code, said) == (2, "") and "is there already" in error


def test_of_two_runs_into_one_folder_the_second_is_refused(large, tmp_path, capsys):
    source, content = large
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=processes.reshard_in_turns, args=(theirs, source, tmp_path / "out"))
    process.start()
    try:
        assert ours.poll(60) and ours.recv() == "begun"
        code, _, error = run(capsys, "reshard", source, tmp_path / "out", "--to", "hf")
        assert code == 2 and "another process is writing it" in error
        assert not (tmp_path / "out").exists()
        ours.send(True)
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
    assert assert_nothing_or_all(tmp_path / "out", content)
    code, _, error = run(capsys, "reshard", source, tmp_path / "out", "--to", "hf")
    assert code == 2 and "is there already" in error
    assert assert_nothing_or_all(tmp_path / "out", content)


def test_a_run_that_fails_leaves_nothing(source, tmp_path):

    def fail(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.reshard(source, tmp_path / "out", progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_files_are_brought_to_disk_while_they_are_filled(source, tmp_path, monkeypatch):
    """And one whose disk fails meanwhile is told of it in the end."""
    synced, sync = threading.Event(), os.fsync

    def heard(number):
        if threading.current_thread() is not threading.main_thread():
            synced.set()
            raise OSError("not now")
        sync(number)

    monkeypatch.setattr(reshard_module, "SYNC_EVERY", 0.001)
    monkeypatch.setattr(os, "fsync", heard)
    waited = []
    processes.reshard(source, tmp_path / "out", progress=lambda *_: waited.append(synced.wait(60)))
    assert waited == [True] * len(tensors())
    assert_same(read_files(tmp_path / "out"), tensors())


def test_progress_ends_with_all_bytes(source, tmp_path):
    said = []
    processes.reshard(source, tmp_path / "out", progress=lambda done, total: said.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors().values())
    assert said[-1] == (total, total) and said == sorted(said) and len(said) == len(tensors())


# ------------------------------------------------------------------------------------------ verify


def test_equal_checkpoints_are_equal(source, shards, tmp_path, capsys):
    engine = save_engine(tmp_path / "engine")
    for one, other in ((source, shards), (shards, source), (engine, shards), (shards, shards)):
        code, said, _ = run(capsys, "verify", one, other)
        assert code == 0 and f"{len(tensors())} of {len(tensors())} parameters are the same" in said


def test_one_changed_bit_anywhere_is_found(source, shards, capsys):
    path = shards / "model-tp-00001-of-00002.safetensors"
    content = path.read_bytes()
    header, data = header_of(content)
    begin = len(content) - len(data)
    owner = {byte: name for name, entry in header.items() if name != "__metadata__"
             for byte in range(*entry["data_offsets"])}  # yapf: disable
    assert len(owner) == len(data)
    # A truth value has one bit that counts.
    for byte in random.Random(3).sample(range(len(data)), 20) + [0, len(data) - 1]:
        changed = bytearray(content)
        changed[begin + byte] ^= 1 if owner[byte] == "mask" else 1 << byte % 8
        path.write_bytes(changed)
        for pair in ((source, shards), (shards, source)):
            code, said, _ = run(capsys, "verify", *pair)
            assert code == 1 and said.splitlines()[0] == f"{owner[byte]}: differs"
    path.write_bytes(content)
    assert run(capsys, "verify", source, shards)[0] == 0


@pytest.mark.parametrize("change, message", [
    (lambda content: content.pop("norm"), "norm: is only in A"),
    (lambda content: content.update(more=torch.ones(1)), "more: is only in B"),
    (lambda content: content.update(norm=content["norm"].float()),
     "norm: is torch.float16 in A and torch.float32 in B"),
    (lambda content: content.update(norm=content["norm"].bfloat16()),
     "norm: is torch.float16 in A and torch.bfloat16 in B"),
    (lambda content: content.update(norm=content["norm"][:4].clone()), "norm: has shape (5,) in A and (4,) in B"),
    (lambda content: content.update(norm=content["norm"].view(1, 5)), "norm: has shape (5,) in A and (1, 5) in B"),
    (lambda content: content.update(nothing=torch.zeros(3, 0)), "nothing: has shape (0, 3) in A and (3, 0) in B"),
    (lambda content: content.update(steps=torch.tensor(8)), "steps: differs"),
])
def test_what_is_not_equal_is_told(source, change, message, tmp_path, capsys):
    content = tensors()
    change(content)
    code, said, _ = run(capsys, "verify", source, save_folder(tmp_path / "other", model=content))
    assert code == 1 and said.splitlines()[0] == message
    name = message.split(":")[0]
    assert run(capsys, "verify", source, tmp_path / "other", "--exclude", name)[0] == 0


def test_values_are_compared_by_their_bits(tmp_path, capsys):
    nan = torch.tensor([math.nan, 0.0])
    other_nan = torch.tensor([0x7fc00001, 0], dtype=torch.int32).view(torch.float32)
    zero = torch.tensor([math.nan, -0.0])
    folders = {
        name: save_folder(tmp_path / name, model={"w": tensor})
        for name, tensor in (("one", nan), ("same", nan.clone()), ("nan", other_nan), ("zero", zero))
    }
    assert [run(capsys, "verify", folders["one"], folders[name])[0] for name in ("same", "nan", "zero")] == [0, 1, 1]


@pytest.mark.parametrize("number", range(4))
def test_tensors_with_gaps_between_their_elements_are_read_and_compared(number, tmp_path, capsys):
    """torch.save keeps how a tensor lies in memory, also where it overlaps itself."""
    base = torch.arange(12.)
    tensor = [base[::2], base.view(3, 4).t(), torch.ones(1).expand(5), base[2:8].view(2, 3)[:, 1:]][number]
    engine = save_engine(tmp_path / "engine", {"module": {"w": tensor}})
    assert run(capsys, "reshard", engine, tmp_path / "same", "--to", "hf")[0] == 0
    assert_same(read_files(tmp_path / "same"), {"w": tensor.contiguous()})
    assert run(capsys, "verify", engine, tmp_path / "same")[0] == 0
    other = tensor.clone(memory_format=torch.contiguous_format)
    other.view(-1)[-1] += 1
    assert run(capsys, "verify", save_folder(tmp_path / "other", model={"w": other}), engine)[0] == 1


def test_more_than_a_block_is_compared(tmp_path, capsys):
    """Of eight million elements the last one."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        with new_file(tmp_path / name / "model.safetensors", {
                "w": (torch.uint8, (8, 1 << 20)),
                "x": (torch.bool, (9 << 20, ))
        }) as made:
            made["w"][-1, -1] = name == "other"
    assert run(capsys, "verify", tmp_path / "one", tmp_path / "other")[:2] == (
        1, f"w: differs\n1 of 2 parameters are the same in {tmp_path / 'one'} and {tmp_path / 'other'}\n")


# ------------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize("kind", ["source", "shards", "engine"])
def test_inspect_prints_json_whose_maps_load(source, shards, kind, tmp_path, capsys):
    folder = {"source": source, "shards": shards}.get(kind) or save_engine(tmp_path / "engine")
    code, said, error = run(capsys, "inspect", folder, "--json")
    assert (code, error) == (0, "")
    found = json.loads(said)
    checkpoint = open_checkpoint(folder)
    assert found["kind"] == checkpoint.kind and found["parameters"].keys() == checkpoint.parameters.keys() == tensors(
    ).keys()
    for name, entry in found["parameters"].items():
        layout = ParamAffineMap.from_dict(entry["map"])
        assert layout == checkpoint.parameters[name].layout
        assert tuple(entry["shape"]) == layout.logical_shape == tuple(tensors()[name].shape)
        assert getattr(torch, entry["dtype"]) == tensors()[name].dtype


def test_inspect_prints_a_table(shards, capsys):
    code, said, _ = run(capsys, "inspect", shards, "--include", "layer.*", "--include", "norm", "--exclude", "*2")
    lines = said.splitlines()
    assert code == 0 and lines[0] == f"{shards}: safetensors over 2 ranks"
    assert lines[1].split() == ["parameter", "shape", "dtype", "layout", "size"]
    assert [line.split()[0] for line in lines[2:-1]] == ["layer.0", "layer.1", "norm"]
    assert "(8, 3)  " in lines[2] and "float32" in lines[2] and "cut along axis 0 over 2  96 B" in lines[2]
    assert "whole on 2" in lines[4]
    assert lines[-1].startswith("3 parameters and buffers")


def test_exit_codes(source, shards, tmp_path, capsys):
    nowhere = tmp_path / "nowhere"
    assert run(capsys, "inspect", source)[0] == 0
    assert run(capsys, "verify", source, shards)[0] == 0
    assert run(capsys, "verify", source, shards, "--include", "no such name")[0] == 2
    assert run(capsys, "reshard", source, tmp_path / "new" / "folder" / "out", "--to", "hf")[0] == 0
    for arguments in (["inspect", nowhere], ["verify", source,
                                             nowhere], ["verify", nowhere,
                                                        source], ["reshard", nowhere, tmp_path / "out", "--to",
                                                                  "hf"], ["reshard", source, source, "--to", "hf"]):
        code, _, error = run(capsys, *arguments)
        assert code == 2 and error.startswith(f"ds_affine {arguments[0]}: "), arguments
        assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [
    ["reshard", "a", "b"], ["reshard", "a", "b", "--to", "tp"], ["reshard", "a", "b", "--to", "tp-0"],
    ["reshard", "a", "b", "--to", "hf", "--file-size", "0"], ["reshard", "a", "b", "--to", "hf", "--file-size", "5XB"],
    ["reshard", "a", "b", "--to", "hf", "--workers", "0"], ["reshard", "a", "b", "--to", "tp-2", "--split", "w"],
    ["reshard", "a", "b", "--to", "tp-2", "--split", "(=0"], ["reshard", "a", "b", "--to", "hf", "--dtype", "int8"],
    ["inspect"], ["verify", "a"], ["explode"], []
])  # yapf: disable
def test_arguments_that_are_none_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: ds_affine") and "Traceback" not in error


def test_a_terminal_without_rich_is_written_to_all_the_same(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert run(capsys, "reshard", source, tmp_path / "out", "--to", "hf")[0] == 0
    assert_same(read_files(tmp_path / "out"), tensors())


@pytest.mark.parametrize("command", ["inspect", "reshard", "verify"])
def test_without_safetensors_the_commands_say_what_to_install(source, command, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    arguments = {"inspect": [], "reshard": [tmp_path / "out", "--to", "hf"], "verify": [source]}[command]
    code, _, error = run(capsys, command, source, *arguments)
    assert code == 2 and "install" in error and "safetensors" in error


def run_program(folder, *arguments, path=()):
    """The command as a user starts it, optionally with folders in front of all others on Python's path."""
    search = os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *arguments],
                          cwd=folder,
                          env=dict(os.environ, PYTHONPATH=search),
                          capture_output=True,
                          text=True,
                          timeout=250)


def test_doctor_says_what_is_in_use(tmp_path):
    done = run_program(tmp_path, "-m", "ds_affine", "doctor")
    assert done.returncode == 0, done.stderr
    for name in ("Python", "torch", "numpy", "deepspeed", "rich", "safetensors"):
        assert any(line.startswith(name) for line in done.stdout.splitlines()), name
    assert torch.__version__ in done.stdout and "this library's" in done.stdout and "gloo" in done.stdout
    assert "problem" not in done.stdout


def test_doctor_starts_where_another_deepspeed_hides_the_packages(tmp_path):
    hiding = tmp_path / "deepspeed"
    (hiding / "checkpoint").mkdir(parents=True)
    (hiding / "__init__.py").write_text("raise SystemExit('it was imported')")
    (hiding / "checkpoint" / "__init__.py").touch()
    done = run_program(tmp_path, "-m", "ds_affine", "doctor", path=[tmp_path])
    assert done.returncode == 1
    assert f"takes `deepspeed` from {hiding}" in done.stdout and "Install the wheels of both" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [[], ["demo"], ["reshard"], ["inspect"], ["verify"], ["doctor"]])
def test_help_imports_nothing_that_is_slow(command, tmp_path):
    program = ("import sys\nfrom ds_affine.cli import main\ntry:\n    main(sys.argv[1:] + ['--help'])\n"
               "except SystemExit as end:\n    print('exit code', end.code)\n"
               "print('imported', [name for name in ('torch', 'numpy', 'deepspeed', 'safetensors', 'rich') "
               "if name in sys.modules])")
    done = run_program(tmp_path, "-c", program, *command)
    assert done.returncode == 0, done.stderr
    *helped, code, imported = done.stdout.splitlines()
    assert (code, imported) == ("exit code 0", "imported []")
    assert helped[0].startswith("usage: ds_affine") and len(helped) > 5
    if command and command[0] in ("reshard", "inspect", "verify"):
        assert any(line.startswith(f"  ds_affine {command[0]} ") for line in helped)
