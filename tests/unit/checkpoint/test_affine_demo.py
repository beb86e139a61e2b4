# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The main job end to end, as a user runs it, and what its launcher does when a process does not do its part."""

import argparse
import multiprocessing
import os
import re
import subprocess
import sys

import pytest
import torch

import affine_demo_processes as processes
from ds_affine import demo_command as command
from ds_affine.demo.launcher import DemoFailed, launch
from ds_affine.demo.reference import cut, former_shard, same_bits
from ds_affine.demo.report import COLUMNS, LEGEND, rows, show
from ds_affine.demo.line import Line

MOVED_PARAMETERS = 17  # of each layer: fused QKV, o, gate, up, down and two norms; embedding, last norm, head


def line(exact, name="weight", frozen=False):
    return Line(name=name,
                shape=(2, 3),
                elements=6,
                frozen=frozen,
                gathered_bytes=48,
                segments=2,
                sent_bytes=8,
                local_copy_bytes=16,
                plan_seconds=0.1,
                move_seconds=0.2,
                exact=exact)


def run_demo_command(folder):
    return subprocess.run([sys.executable, "-m", "ds_affine", "demo", "--timeout", "240"],
                          cwd=folder,
                          capture_output=True,
                          text=True,
                          timeout=280)


def test_demo_moves_every_parameter_exactly(tmp_path):
    done = run_demo_command(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{MOVED_PARAMETERS} of {MOVED_PARAMETERS} parameters exact" in done.stdout
    assert "WRONG" not in done.stdout
    version = command._deepspeed_version()
    trainers = "DeepSpeed is not installed" if version is None else f"DeepSpeed {version} engines, ZeRO stage 3"
    assert trainers in done.stdout


def test_demo_reads_surviving_shards_locally(tmp_path):
    """Only frozen parameters have a holder in the rollouts' own processes; half of each is there."""
    by_process = launch(use_deepspeed=False, timeout=240)
    table = rows(by_process)
    local = {row.name: (row.local_copy_bytes, row.sent_bytes) for row in table}
    frozen = {
        "embed_tokens.weight": 101 * 32
    } | {
        f"layers.0.mlp.{part}_proj.weight": 48 * 32
        for part in ("gate", "up", "down")
    }
    assert {name for name, (copied, _) in local.items() if copied} == set(frozen)
    for name, elements in frozen.items():
        copied, sent = local[name]
        assert copied + sent == 4 * elements
        assert copied == 4 * elements // 2
    assert {row.name for row in table if row.frozen} == set(frozen)
    assert all(row.gathered_bytes == 2 * 4 * row.elements for row in table)


def test_a_failing_process_ends_all_and_shows_its_traceback():
    with pytest.raises(DemoFailed, match=r"rollout 1 failed\.\nTraceback: the shard of rollout 1 is lost"):
        launch(use_deepspeed=False, timeout=3600, entry=processes.one_fails)
    assert multiprocessing.active_children() == []


def test_a_dead_process_ends_all_and_shows_its_last_output():
    with pytest.raises(DemoFailed, match="trainer 0 died with exit code 7") as failure:
        launch(use_deepspeed=False, timeout=3600, entry=processes.one_dies)
    assert "the last line of trainer 0" in str(failure.value)
    assert multiprocessing.active_children() == []


def test_a_process_that_never_finishes_is_named():
    with pytest.raises(DemoFailed, match=r"Not finished in time: .*trainer 1"):
        launch(use_deepspeed=False, timeout=1, entry=processes.one_never_finishes)
    assert multiprocessing.active_children() == []


def test_launch_hands_over_what_each_process_says():
    assert launch(use_deepspeed=False, timeout=3600, entry=processes.all_finish) == {
        label: [label]
        for label in ("trainer 0", "trainer 1", "rollout 0", "rollout 1")
    }


def test_rows_are_exact_only_where_every_rollout_says_so():
    row, = rows({"trainer 0": [line(None)], "rollout 0": [line(True)], "rollout 1": [line(True)]})
    assert row.exact and row.sent_bytes == 24 and row.local_copy_bytes == 48
    row, = rows({"trainer 0": [line(None)], "rollout 0": [line(True)], "rollout 1": [line(False)]})
    assert not row.exact
    row, = rows({"trainer 0": [line(None)]})
    assert not row.exact


def test_shards_are_compared_by_bits():
    values = torch.tensor([1., torch.nan, 0.])
    assert same_bits(values, values.clone())
    assert not same_bits(values, torch.tensor([1., torch.nan, -0.]))
    assert not same_bits(values, torch.tensor([1., 2., 0.]))
    assert not same_bits(values, values.double())
    assert not same_bits(values, values.reshape(3, 1))


def test_reference_puts_each_ranks_heads_of_q_k_and_v_together():
    full = {
        f"{part}_proj.weight": torch.arange(rows).reshape(rows, 1)
        for part, rows in (("q", 4), ("k", 2), ("v", 2))
    }
    assert cut(full, tuple(full), 1).flatten().tolist() == [2, 3, 1, 1]


def test_reference_cuts_uneven_rows_and_columns():
    matrix = torch.arange(15).reshape(5, 3)
    assert cut({"lm_head.weight": matrix}, ("lm_head.weight", ), 0).shape == (3, 3)
    assert cut({"o_proj.weight": matrix}, ("o_proj.weight", ), 1).tolist() == [[2], [5], [8], [11], [14]]
    assert former_shard("o_proj.weight", matrix, 1).tolist() == [[9, 10, 11], [12, 13, 14]]


@pytest.mark.parametrize("verdict, code", [(True, 0), (False, 1)])
def test_exit_code_is_the_verdict(monkeypatch, capsys, verdict, code):
    monkeypatch.setattr(command, "launch", lambda use_deepspeed, timeout: {"rollout 0": [line(verdict)]})
    assert command.run(argparse.Namespace(timeout=1)) == code
    assert ("1 of 1 parameters exact" if verdict else "WRONG") in capsys.readouterr().out


def test_table_without_rich_has_the_same_columns(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(command, "launch", lambda use_deepspeed, timeout: {"rollout 0": [line(True)]})
    assert command.run(argparse.Namespace(timeout=1)) == 0
    header, = (text for text in capsys.readouterr().out.splitlines() if text.startswith(COLUMNS[0]))
    assert re.split(r"  +", header) == list(COLUMNS)


@pytest.mark.parametrize("with_rich", [True, False])
def test_table_marks_frozen_parameters_and_explains_itself(monkeypatch, capsys, with_rich):
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    show(rows({"rollout 0": [line(True, "norm.weight"), line(True, "embed.weight", frozen=True)]}))
    printed = capsys.readouterr().out
    assert re.search(r"^norm +2x3 +8 +48 ", printed, flags=re.MULTILINE)
    assert re.search(r"^embed\* +2x3 +8 +48 ", printed, flags=re.MULTILINE)
    assert re.search(r"^2 parameters +12 +16 +96 ", printed, flags=re.MULTILINE)
    assert printed.endswith(f"{LEGEND}\n")


def test_command_without_a_subcommand_explains_itself(tmp_path):
    done = subprocess.run([sys.executable, "-m", "ds_affine"],
                          cwd=tmp_path,
                          capture_output=True,
                          text=True,
                          timeout=60)
    assert done.returncode == 2
    assert "demo" in done.stderr or "COMMAND" in done.stderr


def test_command_says_where_another_deepspeed_hides_the_packages(tmp_path):
    hiding = tmp_path / "deepspeed"
    (hiding / "checkpoint").mkdir(parents=True)
    (hiding / "__init__.py").touch()
    (hiding / "checkpoint" / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-m", "ds_affine", "demo"],
                          cwd=tmp_path,
                          env=dict(os.environ, PYTHONPATH=path),
                          capture_output=True,
                          text=True,
                          timeout=60)
    assert done.returncode == 2
    assert f"takes `deepspeed` from {hiding}" in done.stderr
    assert "Install the wheels of both into one site directory." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_command_refuses_a_timeout_that_is_none(seconds, capsys):
    from ds_affine.cli import main
    with pytest.raises(SystemExit) as end:
        main(["demo", "--timeout", seconds])
    assert end.value.code == 2
    assert "--timeout" in capsys.readouterr().err
