# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Measure which releases of Python, torch and DeepSpeed the library works with, and write docs/compatibility.md.

    python scripts/compatibility.py --work FOLDER

Each combination gets a virtual environment of its own with torch, DeepSpeed where there is one, and the wheel of this
tree. compatibility_probe.py then tries out what the table lists. What came of a combination is kept in FOLDER and not
measured again, so that an interrupted run goes on; begin with an empty folder after a change to the library. One torch
at a time is on the disk: about 1 GB for a CPU build, 6 GB for others.
"""

import argparse
import functools
import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import groupby
from typing import Optional

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROBE = pathlib.Path(__file__).with_name("compatibility_probe.py")
PACKAGED = ("deepspeed", "ds_affine", "pyproject.toml", "setup.py", "README.md", "LICENSE")
OLDEST_TORCH, NEWEST_TORCH = "2.4.1", "2.15.0"
INSTALL_TIMEOUT, PROBE_TIMEOUT = 1800, 5000
# Column: the check of compatibility_probe.py that fills it.
COLUMNS = {
    "imports": "imports",
    "one process": "one_process",
    "two processes": "two_processes",
    "joint group": "joint_group",
    "dtypes": "dtypes",
    "DTensor": "dtensor",
    "ZeRO-3": "zero3",
    "AutoTP": "autotp",
    "universal checkpoint": "universal",
}
UNINSTALL = "uninstall"


@dataclass(frozen=True)
class Combination:
    """One row; `deepspeed` is None for an environment without it."""
    python: str
    torch: str
    deepspeed: Optional[str]

    @property
    def key(self):
        return f"{self.python}-{self.torch}-{self.deepspeed}"


def combinations():
    """Neighbours share a torch. 0.19.6 is the last release without any affine module, 0.19.7 has the maps alone."""
    releases = {
        ("3.11", "2.13.0"): (None, "0.19.8", "0.19.7", "0.19.6"),
        ("3.11", OLDEST_TORCH): (None, ),
        ("3.13", NEWEST_TORCH): (None, "0.19.8"),
        ("3.10", OLDEST_TORCH): (None, "0.19.8"),
        ("3.12", NEWEST_TORCH): (None, "0.19.8"),
    }
    return [Combination(*key, deepspeed) for key, several in releases.items() for deepspeed in several]


class CannotHave(Exception):
    """This machine cannot make an environment; the message says what is missing."""


# ------------------------------------------------------------------ environments


def interpreter(version):
    """The path of this Python, such as "3.11"; pyenv's are found without being chosen."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"), "versions")
    for path in [*sorted(pyenv.glob(f"{version}.*/bin/python")), shutil.which(f"python{version}")]:
        asked = [path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        if path and subprocess.run(asked, capture_output=True, text=True).stdout.strip() == version:
            return path
    raise CannotHave(f"no Python {version}")


def run(command, timeout, **variables):
    """Run outside the repository, whose sources would be imported, and unseen by the caller's Python."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", OMP_NUM_THREADS="1", PYTHONNOUSERSITE="1", **variables)
    with tempfile.TemporaryDirectory() as elsewhere:
        return subprocess.run([str(part) for part in command],
                              cwd=elsewhere,
                              env=environment,
                              capture_output=True,
                              text=True,
                              timeout=timeout)


def pip(python, *arguments):
    done = run([python, "-m", "pip", "--disable-pip-version-check", *arguments], INSTALL_TIMEOUT)
    if done.returncode:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        raise CannotHave("; ".join(errors) or done.stderr.strip() or f"pip ended with {done.returncode}")


def torch_environment(folder, combination):
    """An environment with torch only, from which those of the combinations are made."""
    done = run([interpreter(combination.python), "-m", "venv", folder], INSTALL_TIMEOUT)
    if done.returncode:
        raise CannotHave(done.stderr.strip().splitlines()[-1])
    # Most of torch is never imported, so compiling all of it would take longer than what is measured.
    pip(folder / "bin/python", "install", "--quiet", "--no-compile", f"torch=={combination.torch}", "numpy")


def linked(environment, folder):
    """A copy of an environment, made of links to its files: pip replaces and removes files, and changes none."""
    shutil.copytree(environment,
                    folder,
                    symlinks=True,
                    copy_function=functools.partial(os.link, follow_symlinks=False))
    return folder / "bin/python"


def library_wheel(folder):
    """The wheel of this tree, from a copy of it: setuptools would take stale files from a `build` folder."""
    with tempfile.TemporaryDirectory() as copy:
        for name in PACKAGED:
            copy_into(ROOT / name, pathlib.Path(copy, name))
        return wheel(folder / "library", copy)


def copy_into(source, target):
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def wheel(folder, requirement):
    """The wheel of a requirement, built into a folder of its own where it is not there already."""
    if not list(folder.glob("*.whl")):
        pip(sys.executable, "wheel", "--quiet", "--no-deps", "-w", folder, requirement)
    found, = folder.glob("*.whl")
    return found


# ------------------------------------------------------------------ measuring


def measure(environment, combination, work):
    """What came of one combination: {"versions": ..., "checks": {column: answer}}."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        python = linked(environment, pathlib.Path(folder, "environment"))
        if combination.deepspeed:
            release = f"deepspeed=={combination.deepspeed}"
            pip(python, "install", "--quiet", wheel(work / release, release), f"torch=={combination.torch}")
        before = neighbours(python)
        pip(python, "install", "--quiet", "--no-deps", library_wheel(work))
        answers = probe(python, work, "versions", *COLUMNS.values())
        versions = answers.pop("versions")["said"]
        checks = {column: answers[check] for column, check in COLUMNS.items()}
        checks[UNINSTALL] = uninstall(python, work, before)
    return {"versions": versions, "checks": checks}


def probe(python, work, *checks):
    done = run([python, "-W", "ignore", PROBE, *checks], PROBE_TIMEOUT, TORCH_EXTENSIONS_DIR=str(work / "extensions"))
    (work / "last-probe.log").write_text(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def neighbours(python):
    """The files in the folder `deepspeed` of an environment, and what is in them; bytecode is left out."""
    site, = python.parents[1].glob("lib/python*/site-packages")
    files = [path for path in site.glob("deepspeed/**/*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(site)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def uninstall(python, work, before):
    """Without our wheel everything must be as it was before it."""
    pip(python, "uninstall", "--quiet", "--yes", "deepspeed-affine")
    if neighbours(python) != before:
        return {"state": "failed", "said": "the folder deepspeed differs from what it was before the installation"}
    answer = probe(python, work, "affine_module")["affine_module"]
    own = "DeepSpeed's" if "deepspeed/checkpoint/affine.py" in before else "none"
    if answer["state"] == "ok" and answer["said"] != own:
        return {"state": "failed", "said": f"deepspeed.checkpoint.affine is then {answer['said']}, not {own}"}
    return {**answer, "said": None if own == "none" else "its own module is back"}


def measure_all(work):
    """{combination: what came of it}, from what is kept in the folder and else measured now."""
    work.mkdir(parents=True, exist_ok=True)
    results = {}
    for _, same_torch in groupby(combinations(), lambda one: (one.python, one.torch)):
        same_torch = list(same_torch)
        missing = [one for one in same_torch if not kept(work, one).exists()]
        if missing:
            measure_beside_one_torch(work, missing)
        results.update((one, json.loads(kept(work, one).read_text())) for one in same_torch)
    return results


def measure_beside_one_torch(work, several):
    with tempfile.TemporaryDirectory(dir=work) as folder:
        environment = pathlib.Path(folder, "environment")
        reason = None
        try:
            torch_environment(environment, several[0])
        except CannotHave as cannot:
            reason = str(cannot)
        for combination in several:
            print(f"{combination.key} ...", flush=True)
            result = {"missing": reason} if reason else measured_or_missing(environment, combination, work)
            kept(work, combination).write_text(json.dumps(result, indent=1))
            print(json.dumps(result), flush=True)


def measured_or_missing(environment, combination, work):
    try:
        return measure(environment, combination, work)
    except CannotHave as cannot:
        return {"missing": str(cannot)}


def kept(work, combination):
    return work / f"{combination.key}.json"


# ------------------------------------------------------------------ the page

PAGE = """# Compatibility

What the library was seen to work with. `python scripts/compatibility.py --work FOLDER` wrote this page: for each row
it made a fresh virtual environment, installed torch, DeepSpeed and the wheel of this tree, and tried out what the
columns say. Machine: {machine}. Nothing here says anything about GPUs.

{table}

"ok" means exact, bit for bit, compared with slices of the whole tensor or with what DeepSpeed itself gathers; "-"
means that the environment has nothing to try.

- **imports**: all packages of the library, after `import deepspeed` where there is one; `deepspeed.checkpoint.affine`
  is ours.
- **one process**: seven layouts, a union among them, each moved to each other (`plan_transfer`, `apply_plan`).
- **two processes**: over gloo, `execute_transfers` and a program of `compile_transfer` that runs three times.
- **joint group**: two processes with a default group each meet in `join_transfer_group`.
- **dtypes**: every dtype that the library moves and this torch has, random bits, in one process and between two.
- **DTensor**: `dtensor_map` of a tensor that `distribute_tensor` cut, moved to another cut.
- **ZeRO-3**: parameters of an engine on two processes after a step, by `zero3_parameter`, moved to column shards.
- **AutoTP**: at degree 2 DeepSpeed makes maps with our classes, and they tell what each rank holds.
- **universal checkpoint**: saved at AutoTP degree 2, then converted by `ds_to_universal`, from maps or without.
- **uninstall**: `pip uninstall deepspeed-affine` leaves DeepSpeed's files as they were, and its own module in use.
{failures}{missing}
## What sets the limits

- **Python** 3.10 is the oldest whose syntax the library keeps to.
- **torch** {oldest} is the oldest tried. A torch that lacks a dtype does not move it; everything else is the same.
- **DeepSpeed** 0.19.8 has the maps and a planner, 0.19.7 the maps alone, and 0.19.6 is the newest without either.
  Beside a release newer than 0.19.8 DeepSpeed's own module stays in use, with one warning, and planner and executor
  go on with our maps.
"""


def page(results):
    measured = {one: result for one, result in results.items() if "versions" in result}
    notes = []
    rows = [row(result, notes) for result in measured.values()]
    heads = ["Python", "torch", "DeepSpeed", *COLUMNS, UNINSTALL]
    lines = [heads, ["---"] * len(heads), *rows]
    failures = "".join(f"\n{number}. {note}" for number, note in enumerate(notes, 1))
    missing = "".join(f"\n- Python {one.python}, torch {one.torch}, DeepSpeed {one.deepspeed}: {result['missing']}"
                      for one, result in results.items() if "missing" in result)
    return PAGE.format(machine=f"{platform.system()} {platform.machine()}, CPU, gloo",
                       table="\n".join(f"| {' | '.join(cells)} |" for cells in lines),
                       failures=failures and f"\n## What failed\n{failures}\n",
                       missing=missing and f"\n## Not measured\n{missing}\n",
                       oldest=OLDEST_TORCH)


def row(result, notes):
    """The cells of a row; `notes` grows by reasons that it does not have yet."""
    versions = result["versions"]
    return [
        versions["python"], versions["torch"], versions["deepspeed"] or "none",
        *(cell(answer, notes) for answer in result["checks"].values())
    ]


def cell(answer, notes):
    said = answer["said"]
    if answer["state"] == "absent":
        return "-"
    if answer["state"] == "ok":
        return f"ok: {said}" if said else "ok"
    said = " ".join(said.split())
    if said not in notes:
        notes.append(said)
    return f"**failed** [{notes.index(said) + 1}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for environments and results")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs" / "compatibility.md")
    arguments = parser.parse_args()
    results = measure_all(arguments.work.resolve())
    arguments.output.write_text(page(results))


if __name__ == "__main__":
    main()
