# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Universal checkpoints of real AutoTP training: saved in one layout, converted, and resumed in another.

Every run is compared with the training that it interrupts and that went on. What a checkpoint restores must be what
was saved, bit for bit, in every layout. Where the layout is the same again, so is every number after it. In another
layout sums over ranks are added up in another order, so that the numbers agree but for rounding.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest
import torch

import affine_universal_processes as ranks
from affine_converted_files import assert_same_files, converted
from affine_rank_host import RankHost
from affine_shard_rules import whole_parameter
from affine_universal_processes import STATES, Training
from deepspeed.checkpoint.affine import ParamAffineMap, replicated_map
from deepspeed.checkpoint.affine_transfer import plan_transfer
from deepspeed.checkpoint.affine_transfer_executor import apply_plan

# Relative to the largest element of a tensor: 64 roundings of float32. The runs here differ by 10 at most.
ROUNDING = 64 * 2.0**-23
# Their gradient is zero, as a shift of all scores changes no probability, so Adam scales up what rounding left of it:
# each step moves by the learning rate in any direction.
KEY_BIAS_STEP = 2 * ranks.LEARNING_RATE

SAVE_AT = 2
# name: how it was trained and saved, and over how many data-parallel ranks
SAVED = {
    "llama": (Training("llama", 2), 1),
    "tied": (Training("tied", 2), 1),
    "fused": (Training("fused", 2), 1),
    "two kv heads": (Training("llama", 2, kv_heads=2), 1),
    "fused, two kv heads": (Training("fused", 2, kv_heads=2), 1),
    "tp4": (Training("llama", 4), 1),
    "three ranks": (Training("llama", 3), 1),
    "zero2": (Training("llama", 2, stage=2), 2),
    "zero3": (Training("llama", 2, stage=3), 2),
    "zero3, fused": (Training("fused", 2, stage=3), 2),
    "zero3, tied": (Training("tied", 2, stage=3), 2),
}
# name, tensor-parallel degree, data-parallel ranks
RESUMED = [
    ("llama", 1, 1),
    ("llama", 2, 1),
    ("llama", 4, 1),
    ("tied", 1, 1),
    ("tied", 2, 1),
    ("tied", 4, 1),
    ("fused", 1, 1),
    ("fused", 2, 1),
    ("fused", 4, 1),
    # More ranks than key and value heads: two of them have no attention at all.
    ("two kv heads", 4, 1),
    ("fused, two kv heads", 4, 1),
    ("tp4", 1, 1),
    ("tp4", 2, 1),
    ("three ranks", 2, 1),
    ("zero2", 1, 2),
    ("zero2", 2, 2),
    ("zero2", 4, 1),
    ("zero3", 1, 1),
    ("zero3", 2, 2),
    ("zero3", 4, 1),
    ("zero3, fused", 2, 2),
    ("zero3, fused", 4, 1),
    ("zero3, tied", 2, 2),
    ("zero3, tied", 1, 2),
]
# What also runs without ``slow``: the three degrees, and ZeRO-3 beneath.
QUICK = [("llama", 1, 1), ("llama", 2, 1), ("fused", 4, 1), ("zero3", 2, 2)]
SLOW = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in RESUMED]


@pytest.fixture(scope="module")
def host():
    with RankHost() as host:
        yield host


@pytest.fixture(scope="module")
def host_without_us():
    with RankHost(hide_our_packages=True) as host:
        yield host


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(host, folder):
    """A function from a name of SAVED to the training that went on, made and converted once."""
    return functools.lru_cache(functools.partial(_save_and_convert, host, folder))


@pytest.fixture(scope="module")
def saved_without_us(host_without_us, folder):
    return functools.lru_cache(functools.partial(_save_and_convert, host_without_us, folder / "theirs"))


def _save_and_convert(host, folder, name):
    training, data_parallel = SAVED[name]
    trained = host.run(training.tp * data_parallel, ranks.train, _with(training, save=name, save_at=SAVE_AT), folder)
    host.run(1, ranks.convert, folder, name, {})
    return trained


def _with(training, **changes):
    return Training(**{**vars(training), **changes})


def _resume(host, folder, name, tp, data_parallel):
    training = _with(SAVED[name][0], tp=tp, start=SAVE_AT, load=f"{name}_universal")
    return host.run(tp * data_parallel, ranks.train, training, folder)


# ------------------------------------------------------------------------------------------ putting ranks together


def _whole(answers, tp, kv_heads, part):
    """``part`` of an answer is {name: this rank's shard}; returns {name: whole}, the same from every replica."""
    first, *others = [{
        name:
        whole_parameter(name, [part(answer)[name] for answer in answers[start:start + tp]], kv_heads)
        for name in part(answers[start])
    } for start in range(0, len(answers), tp)]
    for other in others:
        assert all(torch.equal(other[name], whole) for name, whole in first.items())
    return first


def _whole_state(states, tp, kv_heads):
    """{key: {name: whole}} of fp32 weights and both moments, and the counters, which all ranks must agree on."""
    counters = {(tuple(state["counters"]), state["global_steps"]) for state in states}
    assert len(counters) == 1
    tensors = {
        key:
        _whole([state["parameters"] for state in states], tp, kv_heads, lambda parameters: {
            name: one[key]
            for name, one in parameters.items()
        })
        for key in STATES
    }
    return tensors, counters


def _by_sample(steps, key):
    """{sample: tensor}; ranks with a slice of the vocabulary have a slice of the logits, all others the same."""
    found = {}
    for step in steps:
        for sample, tensor in step[key].items():
            found.setdefault(sample, []).append(tensor)
    for sample, parts in found.items():
        sliced = key == "logits" and parts[0].shape[-1] < ranks.VOCABULARY
        assert sliced or all(torch.equal(part, parts[0]) for part in parts)
        found[sample] = torch.cat(parts, dim=-1)[..., :ranks.VOCABULARY] if sliced else parts[0]
    return found


def _numbers(steps, tp, kv_heads):
    """Everything of one step by name: loss, logits, gradients, fp32 weights and moments; and the counters."""
    state, counters = _whole_state([step["state"] for step in steps], tp, kv_heads)
    numbers = {
        (key, sample): tensor
        for key in ("loss", "logits")
        for sample, tensor in _by_sample(steps, key).items()
    }
    numbers.update({
        ("gradient", name): whole
        for name, whole in _whole(steps, tp, kv_heads, lambda step: step["grads"]).items()
    })
    numbers.update({(key, name): whole for key, wholes in state.items() for name, whole in wholes.items()})
    return numbers, counters


# ------------------------------------------------------------------------------------------ the matrix


@pytest.mark.parametrize("name, tp, data_parallel", SLOW)
def test_resumes_where_training_was(host, folder, saved, name, tp, data_parallel):
    _check_resumed(saved(name), _resume(host, folder, name, tp, data_parallel), name, tp, data_parallel)


def _check_resumed(trained, resumed, name, tp, data_parallel):
    training, saved_data_parallel = SAVED[name]
    kv_heads = training.kv_heads
    expected = _whole_state([answer["steps"][SAVE_AT - 1]["state"] for answer in trained], training.tp, kv_heads)
    begun = _whole_state([answer["begin"] for answer in resumed], tp, kv_heads)
    assert begun[1] == expected[1] == {((float(SAVE_AT), ), SAVE_AT)}
    for key, wholes in expected[0].items():
        assert begun[0][key].keys() == wholes.keys()
        assert all(torch.equal(begun[0][key][name], whole) for name, whole in wholes.items()), key

    same_layout = (tp, data_parallel) == (training.tp, saved_data_parallel)
    for step in range(training.stop - SAVE_AT):
        went_on, counters = _numbers([answer["steps"][SAVE_AT + step] for answer in trained], training.tp, kv_heads)
        numbers, own_counters = _numbers([answer["steps"][step] for answer in resumed], tp, kv_heads)
        assert own_counters == counters and numbers.keys() == went_on.keys()
        different = [
            what for what, tensor in went_on.items()
            if not (torch.equal if same_layout else _close(what, step + 1))(numbers[what], tensor)
        ]
        assert different == []


def _close(what, steps):
    kind, name = what
    # Of a fused bias only the keys' part is like that; it is a third of it at least.
    least = KEY_BIAS_STEP * steps if kind == "fp32" and str(name).endswith("qkv.bias") else 0.0
    return lambda ours, expected: bool((ours - expected).abs().max() <= max(ROUNDING * expected.abs().max(), least))


@pytest.mark.parametrize("name", [
    "llama", "zero3", *(pytest.param(name, marks=pytest.mark.slow) for name in SAVED if name not in ("llama", "zero3"))
])
def test_converted_files_hold_the_whole_parameters(folder, saved, name):
    """The very files, without DeepSpeed's way of loading them."""
    training, _ = SAVED[name]
    expected, _ = _whole_state([answer["steps"][SAVE_AT - 1]["state"] for answer in saved(name)], training.tp,
                               training.kv_heads)
    for key, wholes in expected.items():
        for parameter, whole in wholes.items():
            assert torch.equal(converted(folder / f"{name}_universal", parameter, key), whole)


def test_training_took_these_steps(saved):
    """The comparisons above mean something: every parameter has moved at every step."""
    steps = saved("llama")[0]["steps"]
    for before, after in zip(steps, steps[1:]):
        for name, state in after["state"]["parameters"].items():
            assert not torch.equal(state["fp32"], before["state"]["parameters"][name]["fp32"])


# ------------------------------------------------------------------------------------------ DeepSpeed's own module


def test_the_two_hosts_run_different_modules(host, host_without_us, folder, saved, saved_without_us):
    saved("llama"), saved_without_us("llama")
    ours, = host.run(1, ranks.convert, folder, "llama", {"output_folder": str(folder / "again")})
    theirs, = host_without_us.run(1, ranks.convert, folder / "theirs", "llama",
                                  {"output_folder": str(folder / "again theirs")})
    assert ours.endswith("affine/__init__.py") and theirs.endswith("checkpoint/affine.py")


@pytest.mark.parametrize("name", ["llama", pytest.param("fused", marks=pytest.mark.slow)])
def test_each_side_writes_the_same_maps_and_trains_the_same(folder, saved, saved_without_us, name):
    ours, theirs = saved(name), saved_without_us(name)
    assert [_stored_info(folder / name, rank) for rank in range(2)] == \
        [_stored_info(folder / "theirs" / name, rank) for rank in range(2)]
    expected, found = (_numbers([answer["steps"][-1] for answer in side], 2, 4)[0] for side in (theirs, ours))
    assert all(torch.equal(found[what], tensor) for what, tensor in expected.items())


def _stored_info(checkpoint, rank):
    # weights_only: metadata must be plain data, so that any reader can have it.
    state = torch.load(checkpoint / f"mp_rank_{rank:02d}_model_states.pt", weights_only=False)
    return json.loads(json.dumps(state["universal_checkpoint_info"]))


@pytest.mark.slow
@pytest.mark.parametrize("name, tp", [("llama", 4), ("fused", 1), ("fused", 4)])
def test_reads_what_deepspeeds_own_module_wrote(host, folder, saved_without_us, name, tp):
    """Theirs saved; ours converts and restores."""
    trained = saved_without_us(name)
    own = folder / "theirs read by ours"
    shutil.copytree(folder / "theirs" / name, own / name, dirs_exist_ok=True)
    host.run(1, ranks.convert, own, name, {})
    _check_resumed(trained, _resume(host, own, name, tp, 1), name, tp, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name, tp", [("llama", 4), ("fused", 1), ("fused", 4)])
def test_deepspeeds_own_module_reads_what_we_wrote(host_without_us, folder, saved, name, tp):
    """Ours saved; theirs converts and restores."""
    trained = saved(name)
    theirs = folder / "ours read by theirs"
    shutil.copytree(folder / name, theirs / name, dirs_exist_ok=True)
    host_without_us.run(1, ranks.convert, theirs, name, {})
    _check_resumed(trained, _resume(host_without_us, theirs, name, tp, 1), name, tp, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "zero3", "fused"])
def test_both_convert_to_the_same_files(host_without_us, folder, saved, name):
    saved(name)
    there = folder / "converted by theirs" / f"{name}_universal"
    host_without_us.run(1, ranks.convert, folder, name, {"output_folder": str(there)})
    assert_same_files(folder / f"{name}_universal", there)


# ------------------------------------------------------------------------------------------ maps beside patterns


@pytest.mark.parametrize(
    "name",
    ["llama", "fused",
     pytest.param("zero3", marks=pytest.mark.slow),
     pytest.param("tied", marks=pytest.mark.slow)])
def test_a_reader_that_knows_no_maps_finds_the_same(host, folder, saved, name):
    """The converter falls back to the pattern lists, as older ones do which never look for maps."""
    trained = saved(name)
    without = folder / "without maps"
    shutil.copytree(folder / name, without / name, dirs_exist_ok=True)
    changed = [_drop_maps(path) for path in (without / name).glob("*.pt")]
    assert any(changed)
    host.run(1, ranks.convert, without, name, {})
    training, _ = SAVED[name]
    expected, _ = _whole_state([answer["steps"][SAVE_AT - 1]["state"] for answer in trained], training.tp, 4)
    for key, wholes in expected.items():
        for parameter, whole in wholes.items():
            assert torch.equal(converted(without / f"{name}_universal", parameter, key), whole)
    _check_resumed(trained, _resume(host, without, name, 1, 1), name, 1, 1)


def _drop_maps(path):
    """Whether the file had maps."""
    content = torch.load(path, weights_only=False)
    places = [content, content.get("optimizer_state_dict") or {}]
    found = [
        place["universal_checkpoint_info"].pop("affine_map", None) for place in places
        if place.get("universal_checkpoint_info")
    ]
    torch.save(content, path)
    return any(found)


def test_strict_conversion_means_something(host, folder, saved):
    """All conversions here are strict. A pattern of nothing makes one fail, so it would have told."""
    saved("llama")
    other = folder / "with a stray pattern"
    shutil.copytree(folder / "llama", other / "llama")
    for path in (other / "llama").glob("mp_rank_*"):
        content = torch.load(path, weights_only=False)
        content["universal_checkpoint_info"]["tp_replicated_parameter_patterns"].append("^no_such_parameter$")
        torch.save(content, path)
    with pytest.raises(AssertionError, match="Unused patterns=.*no_such_parameter"):
        host.run(1, ranks.convert, other, "llama", {})


@pytest.mark.slow
def test_the_command_converts_the_same(folder, saved):
    """``python -m deepspeed.checkpoint.ds_to_universal``, as people run it."""
    saved("llama")
    there = folder / "by command" / "llama_universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(folder / "llama"), "--output_folder", str(there)]
    environment = dict(os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_files(folder / "llama_universal", there)


# ------------------------------------------------------------------------------------------ scaled maps
# No layer of DeepSpeed 0.19.8 states one. A row-parallel layer may hold its bias divided by the number of ranks.


@pytest.mark.parametrize("saved_at, restored_at", [(2, 4), (4, 2), (2, 1), (1, 4), (3, 2), (2, 3)])
def test_a_divided_bias_moves_between_degrees(saved_at, restored_at):
    bias = torch.randn(9, generator=torch.Generator().manual_seed(5))
    source, target = (replicated_map((9, ), degree, 1.0 / degree) for degree in (saved_at, restored_at))
    held = {rank: bias * (1.0 / saved_at) for rank in range(saved_at)}
    whole = source.rebuild(held)
    restored = {rank: target.extract(whole, rank) for rank in range(restored_at)}
    assert torch.equal(whole, held[0] / (1.0 / saved_at))
    assert all(torch.equal(shard, whole * (1.0 / restored_at)) for shard in restored.values())
    # The sum over ranks is the bias: exactly, where the degrees are powers of two, which scale without rounding.
    if 3 not in (saved_at, restored_at):
        assert torch.equal(sum(restored.values()), bias)
    else:
        torch.testing.assert_close(sum(restored.values()), bias)

    received = {rank: torch.empty(9) for rank in range(restored_at)}
    apply_plan(plan_transfer(target, source, scale_power=1), held, received)
    assert all(torch.equal(received[rank], shard) for rank, shard in restored.items())


@pytest.mark.parametrize("power", [-1, -2])
def test_moments_through_a_scale_are_refused(power):
    layout = replicated_map((9, ), 2, 0.5)
    with pytest.raises(NotImplementedError, match="an optimizer state cannot move through a scale"):
        layout.rebuild({0: torch.ones(9), 1: torch.ones(9)}, power)
    with pytest.raises(NotImplementedError, match="an optimizer state cannot move through a scale"):
        layout.extract(torch.ones(9), 0, power)


def test_the_converter_refuses_moments_through_a_scale(tmp_path):
    """DeepSpeed's own converter reads the map of a divided bias: the weight comes out whole, and then it stops."""
    from deepspeed.checkpoint.ds_to_universal import merge_tp_slices
    bias = torch.randn(9, generator=torch.Generator().manual_seed(5))
    for rank in range(2):
        slices = tmp_path / "slices" / "out.bias" / str(rank)
        slices.mkdir(parents=True)
        for key, value in (("fp32", bias / 2), ("exp_avg", bias), ("exp_avg_sq", bias), ("step", torch.tensor(2.0))):
            torch.save(value, slices / f"{key}.00")
    layout = replicated_map((9, ), 2, 0.5)
    assert ParamAffineMap.from_dict(layout.to_dict()) == layout
    info = {"affine_map": {"version": 1, "params": {r"^out\.bias$": layout.to_dict()}}}
    with pytest.raises(NotImplementedError, match="an optimizer state cannot move through a scale"):
        merge_tp_slices(info, str(tmp_path / "out"), str(tmp_path / "slices"), 2, ("out.bias", [(9, ), (9, )]))
    assert torch.equal(torch.load(tmp_path / "out" / "out.bias" / "fp32.pt", weights_only=False)["param"], bias)
    assert not (tmp_path / "out" / "out.bias" / "exp_avg.pt").exists()
