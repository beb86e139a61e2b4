# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The examples of the documents and of the docstrings do what they say."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re
import socket
import subprocess
import sys

import numpy
import pytest
import torch

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs"
SPECIFICATION = DOCS / "affine_ir_spec.md"
PACKAGES = ("affine_geometry", "affine", "affine_transfer", "affine_transfer_executor", "affine_adapters")
WITH_EXAMPLES = ("affine_geometry", "affine", "affine_transfer")


def module_names(package):
    name = f"deepspeed.checkpoint.{package}"
    return [name, *(f"{name}.{found.name}" for found in pkgutil.iter_modules(importlib.import_module(name).__path__))]


def public_names():
    """What an example may use without importing it: torch, numpy and everything that the packages export."""
    names = {"torch": torch, "numpy": numpy, "np": numpy}
    for package in PACKAGES:
        module = importlib.import_module(f"deepspeed.checkpoint.{package}")
        names.update((name, getattr(module, name)) for name in module.__all__)
    return names


def run_examples(tests):
    """Run doctests and return how many examples they had; what went wrong is in the assertion's message."""
    said = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        # The blocks of a document share their names, so nothing is cleared after one of them.
        runner.run(test, out=said.append, clear_globs=False)
    result = runner.summarize(verbose=False)
    assert result.failed == 0, "".join(said)
    return result.attempted


@pytest.mark.parametrize("name", [name for package in PACKAGES for name in module_names(package)])
def test_docstring_examples(name):
    module = importlib.import_module(name)
    found = doctest.DocTestFinder().find(module, globs={**public_names(), **vars(module)})
    assert run_examples(found) == sum(len(test.examples) for test in found)


@pytest.mark.parametrize("package", WITH_EXAMPLES)
def test_package_has_docstring_examples(package):
    modules = [importlib.import_module(name) for name in module_names(package)]
    examples = [test.examples for module in modules for test in doctest.DocTestFinder().find(module)]
    assert sum(map(len, examples)) >= 3


def python_blocks(document):
    """The python blocks of a document with the line that each starts on."""
    text = document.read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, block.start(1)), block[1]


def specified_signatures():
    """``(name, arguments)`` of everything that sections 4 and 7 introduce."""
    text = SPECIFICATION.read_text(encoding="utf-8")
    layouts, algebra = (re.search(rf"^## {number} .*?(?=^## )", text, flags=re.DOTALL | re.MULTILINE)[0]
                        for number in (4, 7))  # yapf: disable
    return (re.findall(r"^\*\*`(\w+)(\([^`]*\))`\*\*", layouts, flags=re.MULTILINE) +
            re.findall(r"^- `(\w+)(\([^`]*\))`:", algebra, flags=re.MULTILINE))


def test_specification_names_the_arguments_as_the_code_does():
    signatures = dict(specified_signatures())
    affine = importlib.import_module("deepspeed.checkpoint.affine")
    assert signatures == {name: str(inspect.signature(getattr(affine, name))) for name in signatures}
    makers = {name for name in affine.__all__ if name.endswith("_map")}
    assert makers | {"concat_affine_maps", "narrow", "permute", "relabel", "keep_locations", "compose"
                     } == set(signatures)


@pytest.mark.parametrize("name, least", [("affine_ir_spec", 20), ("tutorial", 15), ("which_layout", 5),
                                         ("replicas", 5), ("extending", 8)])
def test_examples_of_the_documents(name, least):
    """All blocks run in their order in one namespace, as a reader would paste them."""
    names, parser, document = {}, doctest.DocTestParser(), DOCS / f"{name}.md"
    blocks = [parser.get_doctest(block, names, name, str(document), line) for line, block in python_blocks(document)]
    for block in blocks:
        # get_doctest copies the names; the blocks are to share them.
        block.globs = names
    assert all(block.examples for block in blocks)
    assert run_examples(blocks) >= least


def test_commands_of_the_documents(tmp_path):
    """All lines of docs/command.md run in their order in one shell, and say something."""
    text = (DOCS / "command.md").read_text(encoding="utf-8")
    lines = re.findall(r"^    (.*)\n", text, flags=re.MULTILINE)
    script = "\n".join(lines).replace("ds_affine ", f"{sys.executable} -m ds_affine ")
    script = script.replace("python -c",
                            f"{sys.executable} -c").replace("explain NAME SOURCE TARGET",
                                                            "explain up_proj.weight zero3-3:model.json rows-2")
    ended = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    assert script.count("-m ds_affine") == 8 and "1 maps checked, 0 findings" in ended.stdout
    assert "up_proj.weight, shape (1024, 512)" in ended.stdout and "the only holder" in ended.stdout
    made = {"model.json", "maps.json", "page.html", "figure.svg", "explain.svg"}
    assert {path.name for path in tmp_path.iterdir()} == made


def test_script_of_the_tutorial(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = tmp_path / "sync.py"
    script.write_text((DOCS / "sync.py").read_text().replace("29511", port))
    processes = [
        subprocess.Popen([sys.executable, script, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(4)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 4
    assert said[:2] == ["", ""]
    for server in (0, 1):
        assert said[2 +
                    server].splitlines() == [f"server {server}, step {step}: {12 * (step + 1)}" for step in range(3)]
