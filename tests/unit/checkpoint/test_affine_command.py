# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The commands that look at layouts: `ds_affine plan`, `explain` and `lint`."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from math import prod

import pytest

from affine_oracle import element_holders
from deepspeed.checkpoint.affine import dump_affine_maps, replicated_map, zero3_partition_map
from ds_affine.cli import main
from ds_affine.explain_command import has_address

SHAPES = {"up.weight": (6, 4), "down.weight": (4, 6), "norm.weight": (5, )}
PIECE = {"shape": [2], "source": [0, [1]], "dest": [0, [1]], "locations": [0]}
HALF = {"logical_shape": [4], "ranks": {"0": {"shard_shape": [2], "pieces": [PIECE]}}}


@pytest.fixture
def table(tmp_path):
    """A file with names and shapes."""
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"parameters": SHAPES}))
    return path


def written(path, maps):
    path.write_text(json.dumps(dump_affine_maps(maps)))
    return str(path)


def printed(capsys, *arguments):
    """Exit code, standard output, errors."""
    code = main(list(map(str, arguments)))
    return code, *capsys.readouterr()


def links_of(source, target, width, first_target):
    """Bytes by (process, process), element by element: sources here have no replicas."""
    sent = Counter()
    for name in SHAPES:
        owner, wanted = element_holders(source[name]), element_holders(target[name])
        for element in range(prod(SHAPES[name])):
            for location in wanted[element]:
                (holder, ) = owner[element]
                sent[holder, location + first_target] += width
    return sent


def test_figures_of_a_plan_are_those_of_its_elements(capsys, table, tmp_path):
    target = {name: replicated_map(shape, 2) for name, shape in SHAPES.items()}
    source = {name: zero3_partition_map(shape, 4) for name, shape in SHAPES.items()}
    code, out, _ = printed(capsys, "plan", f"zero3-4:{table}", written(tmp_path / "maps.json", target), "--json",
                           "--bandwidth", "1KB")
    facts, expected = json.loads(out), links_of(source, target, 2, 4)
    assert code == 0 and facts["parameters"] == len(SHAPES) and facts["local_bytes"] == 0
    assert {(one, other): numbytes for one, other, numbytes in facts["links"]} == expected
    assert [link[2] for link in facts["links"]] == sorted(expected.values(), reverse=True)
    assert facts["sent_bytes"] == sum(expected.values())
    received = sum(numbytes for (_, other), numbytes in expected.items() if other == 4)
    assert facts["busiest_receiver"] == [4, received] and facts["seconds"] == received / 1000


def test_locations_may_be_on_the_same_processes(capsys, table):
    code, out, _ = printed(capsys, "plan", f"rows-2:{table}", "rows-2", "--same-processes", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["sent_bytes"] == 0 and facts["links"] == [] and facts["busiest_sender"] is None
    # Vectors are whole on both.
    assert facts["local_bytes"] == 2 * (24 + 24 + 2 * 5)


def test_a_plan_in_words(capsys, table):
    code, out, _ = printed(capsys, "plan", f"zero3-2:{table}", "columns-2", "--bandwidth", "1MB")
    assert code == 0 and "3 parameters" in out and "busiest sender: process 0" in out
    assert "heaviest of 4 links" in out and "at 1,000,000 bytes per second" in out


def test_an_explanation_names_pieces_copies_and_holders(capsys, table):
    code, out, _ = printed(capsys, "explain", "up.weight", f"whole-3:{table}", "rows-2")
    lines = [re.split("  +", line) for line in out.splitlines()]
    assert code == 0 and "up.weight, shape (6, 4)" in out
    # Three pieces on the source side, which all hold, and two copies; the third holder has nothing to send.
    assert sum(line[-1] == "0, 1, 2" for line in lines) == 3
    assert lines[-2:] == [["0", "0", "0", "0", "(3, 4)", "24 B", "0 to 3", "0, 1, 2", "has least to send so far"],
                          ["1", "12", "1", "0", "(3, 4)", "24 B", "1 to 4", "0, 1, 2", "has least to send so far"]]


@pytest.mark.parametrize("source, options, why", [("zero3-2", (), "the only holder"),
                                                  ("whole-2", ("--same-processes", ), "on the same process")])
def test_an_explanation_says_why_a_holder_was_chosen(capsys, table, source, options, why):
    code, out, _ = printed(capsys, "explain", "up.weight", f"{source}:{table}", "rows-2", *options)
    copies = out.partition("copies: ")[2].splitlines()[2:]
    assert code == 0 and len(copies) == 2 and all(line.endswith(why) for line in copies)


@pytest.mark.parametrize("layout", [zero3_partition_map((5, 7), 4), replicated_map((3, 4), 2)])
def test_addresses_of_a_piece(layout):
    for pieces in layout.pieces_by_rank.values():
        for piece in pieces:
            held = {
                piece.dest_offset + sum(index * stride for index, stride in zip(indices, piece.dest_strides))
                for indices in _indices(piece.shape)
            }
            assert [has_address(piece, address) for address in range(40)] == [at in held for at in range(40)]


def _indices(shape):
    if not shape:
        return [()]
    return [(first, *rest) for first in range(shape[0]) for rest in _indices(shape[1:])]


@pytest.mark.parametrize("arguments, words", [
    (("plan", "zero3-4", "rows-2"), "name no parameters"),
    (("plan", "elsewhere", "rows-2"), "is no layout"),
    (("explain", "nothing", "zero3-2:TABLE", "rows-2"), "no parameter 'nothing'"),
    (("explain", "up", "zero3-2:TABLE", "rows-2"), "did you mean up.weight?"),
    (("plan", "zero3-2:elsewhere.json", "rows-2"), "elsewhere.json"),
    (("plan", "TABLE", "rows-2"), "is a table of shapes; say in which layout, such as zero3-8:"),
    (("plan", "ONE", "rows-2"), "is one map without a name"),
    (("plan", "ODD", "rows-2"), "odd.json: The affine maps have no version"),
    (("lint", "ODD"), "odd.json: The affine maps have no version"),
])
def test_what_cannot_be_planned_is_said_on_one_line(capsys, table, tmp_path, arguments, words):
    files = {"TABLE": table, "ONE": tmp_path / "one.json", "ODD": tmp_path / "odd.json"}
    files["ONE"].write_text(json.dumps(HALF))
    files["ODD"].write_text("{}")
    for word, path in files.items():
        arguments = [argument.replace(word, str(path)) for argument in arguments]
    code, out, err = printed(capsys, *arguments)
    assert code == 2 and out == "" and words in err and len(err.splitlines()) == 1


def test_what_only_one_side_has_is_told(capsys, table, tmp_path):
    maps = {name: replicated_map(shape, 2) for name, shape in SHAPES.items() if name != "norm.weight"}
    maps["extra"] = replicated_map((2, ), 2)
    arguments = ["plan", f"zero3-4:{table}", written(tmp_path / "maps.json", maps)]
    code, out, _ = printed(capsys, *arguments)
    assert code == 0 and "2 parameters" in out
    assert f"left out: 1 only in zero3-4:{table}: norm.weight\n" in out and "maps.json: extra\n" in out
    facts = json.loads(printed(capsys, *arguments, "--json")[1])
    assert (facts["only_in_source"], facts["only_in_target"]) == (["norm.weight"], ["extra"])


def test_lint_tells_all_that_is_wrong(capsys, tmp_path):
    whole = dump_affine_maps({"good": replicated_map((4, ), 2)})["params"]["good"]
    # Two pieces where one would do.
    parts = [{**PIECE}, {**PIECE, "source": [2, [1]], "dest": [2, [1]]}]
    split = {"logical_shape": [4], "ranks": {"0": {"shard_shape": [4], "pieces": parts}}}
    path = tmp_path / "maps.json"
    path.write_text(
        json.dumps({
            "version": 1,
            "params": {
                "good": whole,
                "half": HALF,
                "split": split,
                "odd": {
                    "x": 1
                }
            }
        }))
    code, out, _ = printed(capsys, "lint", path)
    lines = out.splitlines()
    assert code == 1 and lines[-1] == "4 maps checked, 3 findings"
    assert [line.split(":")[1] for line in lines[:-1]] == ["half", "split", "odd"]
    assert "incomplete: 2 elements" in lines[0] and "not canonical: 2 pieces, where 1" in lines[1]
    assert "invalid" in lines[2]


def test_lint_reads_one_map_and_good_files(capsys, tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps(HALF))
    assert printed(capsys, "lint", path)[0] == 1
    good = written(tmp_path / "good.json", {"w": zero3_partition_map((5, 7), 4)})
    assert printed(capsys, "lint", good)[:2] == (0, "1 maps checked, 0 findings\n")


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"version": 7, "params": {}}', '{"a": 1}'])
def test_lint_says_what_it_cannot_read(capsys, tmp_path, content):
    path = tmp_path / "maps.json"
    path.write_text(content)
    code, _, err = printed(capsys, "lint", path)
    assert code == 2 and err.startswith("ds_affine lint: ")


def test_who_stops_reading_is_no_error(table):
    command = f"{sys.executable} -m ds_affine plan zero3-64:{table} rows-2 --json | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=250)
    assert done.stdout == "{\n" and "Traceback" not in done.stderr and "Broken" not in done.stderr


@pytest.mark.parametrize("shape", [5, None, "abc", {"1": 2}, [[1]], [1.5], [True], [None], ["4"], [-1]])
@pytest.mark.parametrize("command", [["plan"], ["explain", "w"]])
def test_a_table_of_odd_shapes_is_refused(capsys, tmp_path, command, shape):
    table = tmp_path / "model.json"
    table.write_text(json.dumps({"parameters": {"w": shape}}))
    code, out, err = printed(capsys, *command, f"zero3-2:{table}", "rows-2")
    assert (code, out) == (2, "") and f"ds_affine {command[0]}: {table}: " in err and len(err.splitlines()) == 1


def test_names_do_nothing_to_a_terminal(capsys, tmp_path):
    name = "a\x1b[31m\n\ud800b"
    path = tmp_path / "maps.json"
    path.write_text(json.dumps({"version": 1, "params": {name: HALF}}))
    shown = "a\\x1b[31m\\n\\ud800b"
    assert printed(capsys, "lint", path)[1].splitlines()[0].startswith(f"{path}:{shown}: incomplete")


# ------------------------------------------------------------------------------------------ streams and signals


def ran(command, tmp_path, **variables):
    """A shell command whose words ``ds_affine`` are ours."""
    return subprocess.run(["bash", "-c", command.replace("ds_affine", f"{sys.executable} -m ds_affine")],
                          cwd=tmp_path,
                          env={
                              **os.environ,
                              **variables
                          },
                          capture_output=True,
                          text=True,
                          timeout=250)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_change_no_answer(tmp_path, closed):
    (tmp_path / "model.json").write_text(json.dumps({"parameters": SHAPES}))
    (tmp_path / "map.json").write_text(json.dumps(HALF))
    assert ran(f"ds_affine plan zero3-2:model.json rows-2 {closed}", tmp_path).returncode == 0
    assert ran(f"ds_affine lint map.json {closed}", tmp_path).returncode == 1
    assert ran(f"ds_affine lint nothing.json {closed}", tmp_path).returncode == 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_answer_that_cannot_be_written_is_an_error(tmp_path, unbuffered):
    (tmp_path / "model.json").write_text(json.dumps({"parameters": SHAPES}))
    ended = ran("ds_affine plan zero3-2:model.json rows-2 > /dev/full", tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert ended.returncode == 2 and ended.stderr.splitlines()[-1].startswith("ds_affine plan: ")
    assert "Traceback" not in ended.stderr and "No space left" in ended.stderr


def test_names_that_the_terminal_does_not_know_are_printed(tmp_path):
    name = "gr\u00f6\u00dfe"
    (tmp_path / "model.json").write_text(json.dumps({"parameters": {name: [4, 4]}}))
    ended = ran(f"ds_affine explain {name} zero3-2:model.json rows-2", tmp_path, PYTHONIOENCODING="ascii")
    assert ended.returncode == 0 and "gr\\xf6\\xdfe, shape (4, 4)" in ended.stdout


def test_an_interrupt_ends_without_a_traceback(tmp_path):
    program = (
        "import signal, sys; import ds_affine.lint_command as lint; import ds_affine.cli as cli; "
        "lint.read_json = lambda path: signal.raise_signal(signal.SIGINT); sys.exit(cli.main(['lint', 'file']))")
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 130 and ended.stderr == ""


# ------------------------------------------------------------------------------------------ completion


def completions(script, *words):
    """What bash would offer for the last word."""
    line = " ".join(words)
    program = (
        f"{script}\nCOMP_WORDS=({' '.join(words[:-1])} {words[-1] or chr(39) * 2})\nCOMP_CWORD={len(words) - 1}\n"
        f"COMP_LINE='{line}'\nCOMP_POINT={len(line)}\n_shtab_ds_affine\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"")
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60,
                          check=True).stdout.split()


def test_a_shell_completes_subcommands_options_and_files(capsys, tmp_path, monkeypatch):
    code, script, _ = printed(capsys, "completion", "bash")
    assert code == 0
    assert completions(script, "ds_affine", "ins") == ["inspect"]
    assert completions(script, "ds_affine", "reshard", "--dt") == ["--dtype"]
    (tmp_path / "maps.json").touch()
    monkeypatch.chdir(tmp_path)
    assert completions(script, "ds_affine", "lint", "ma") == ["maps.json"]


@pytest.mark.parametrize("shell, words", [("zsh", "#compdef ds_affine"), ("tcsh", "complete ds_affine")])
def test_other_shells_get_a_script_of_theirs(capsys, shell, words):
    code, script, _ = printed(capsys, "completion", shell)
    assert code == 0 and words in script


def test_completion_tells_what_it_lacks(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, out, errors = printed(capsys, "completion", "bash")
    assert (code, out) == (2, "") and "pip install shtab" in errors
