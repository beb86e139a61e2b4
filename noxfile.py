# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Sessions that set everything up from a bare Python: `nox -s demo`, `nox -s tests`, `nox -s slow`, `nox -s docs`,
`nox -s browser`, `nox -s lint`.

Each session installs the wheel built from this tree into a virtual environment of its own and runs outside the
repository, so that what is exercised is what a user installs.
"""

import contextlib
import pathlib
import re
import shutil
import subprocess
import tempfile

import nox
from nox.command import CommandFailed

ROOT = pathlib.Path(__file__).resolve().parent
PACKAGED = ["deepspeed", "ds_affine", "pyproject.toml", "setup.py", "README.md", "LICENSE"]
CHECKED = ["deepspeed", "ds_affine", "docs", "tests", "benchmarks", "examples", "scripts", "noxfile.py", "setup.py"]
DEEPSPEED = "deepspeed==0.19.8"
# DeepSpeed then compiles none of its operators, while it is installed or later.
DEEPSPEED_ENV = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
RUN_ENV = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests", "demo"]


@nox.session
def demo(session):
    """Move a model from a real DeepSpeed ZeRO-3 engine to tensor-parallel shards; posargs go to the command."""
    install_torch(session)
    install_library(session, "cli")
    install_deepspeed(session)
    with outside_repository(session):
        session.run("ds_affine", "demo", *session.posargs, env=RUN_ENV)


@nox.session
@nox.parametrize("beside_deepspeed", [False, True], ids=["alone", "beside-deepspeed"])
def tests(session, beside_deepspeed):
    """Run the tests against the wheel, without DeepSpeed and then beside it; posargs go to pytest."""
    install_torch(session)
    wheel = install_library(session, "test")
    environment = dict(RUN_ENV, AFFINE_WHEEL=str(wheel))
    selection = ["-m", "not slow"]
    if beside_deepspeed:
        environment["AFFINE_DEEPSPEED_WHEEL"] = install_deepspeed_for_tests(session)
    else:
        # pytest takes a relative pattern to begin at the folder it runs in.
        needing_deepspeed = ("test_affine_deepspeed_*", "test_affine_packaging.py")
        selection += [f"--ignore-glob={ROOT}/tests/*{name}" for name in needing_deepspeed]
    run_pytest(session, selection, environment)


@nox.session
def slow(session):
    """Run the tests that are left out above: more configurations of save, convert and resume in DeepSpeed."""
    install_torch(session)
    install_library(session, "test")
    install_deepspeed_for_tests(session)
    run_pytest(session, ["-m", "slow"], RUN_ENV)


@nox.session
def browser(session):
    """Look at the page of `ds_affine explain --html` in headless Chromium, which the system must have."""
    install_torch(session)
    install_library(session, "test")
    session.install("selenium>=4.11")
    with outside_repository(session):
        session.run("pytest", "-c", str(ROOT / "pyproject.toml"), str(ROOT / "tests" / "browser"))


@nox.session
def docs(session):
    """Build the documentation into docs/_build; every warning is an error."""
    install_torch(session)
    install_library(session, "docs")
    session.run("sphinx-build", "-E", "-W", "--keep-going", "-b", "html", "docs", "docs/_build")


@nox.session
def lint(session):
    """Formatting, flake8 and licence headers."""
    session.install("yapf==0.43.0", "flake8>=7,<8")
    targets = [name for name in CHECKED if (ROOT / name).exists()]
    session.run("yapf", "--diff", "--recursive", *targets)
    session.run("flake8", *targets)
    session.run("python", "scripts/check_licence.py", *python_files(targets))


def install_torch(session):
    """A CPU build where there is no GPU and pip knows one, so that nobody downloads GPU libraries for a demo."""
    if not has_gpu():
        build = newest_cpu_build(session)
        if build is not None:
            try:
                session.install(f"torch=={build}")
                return
            except CommandFailed:
                session.warn(f"torch {build} could not be installed; the ordinary build is next")
    session.install("torch")


def has_gpu():
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0


def newest_cpu_build(session):
    """The first `+cpu` version that pip lists (newest first), or None."""
    listing = session.run("python", "-m", "pip", "index", "versions", "torch", silent=True, success_codes=[0, 1, 2])
    builds = re.findall(r"[0-9][0-9a-z.]*\+cpu\b", listing or "")
    return builds[0] if builds else None


def pin_torch(session):
    """Path of a constraints file that keeps the torch which is installed."""
    version = session.run("python", "-c", "import importlib.metadata as m; print(m.version('torch'))", silent=True)
    constraints = pathlib.Path(session.virtualenv.location) / "torch-constraint.txt"
    constraints.write_text(f"torch=={version.strip()}\n")
    return str(constraints)


def install_library(session, extra):
    wheel = build_library(session)
    session.install(f"{wheel}[{extra}]", "-c", pin_torch(session))
    # In a reused environment the same version may be there with older content.
    session.install("--force-reinstall", "--no-deps", str(wheel))
    return wheel


def install_deepspeed_for_tests(session):
    """Install DeepSpeed, and transformers for models; returns the path of DeepSpeed's wheel."""
    install_deepspeed(session)
    # It must go on telling whether DeepSpeed is there, which is asked for real.
    session.install("transformers", "-c", pin_torch(session))
    return str(build_deepspeed(session))


def run_pytest(session, selection, environment):
    with outside_repository(session):
        require_installed_library(session)
        session.run("pytest",
                    "-c",
                    str(ROOT / "pyproject.toml"),
                    "--rootdir",
                    str(ROOT),
                    *selection,
                    *pytest_arguments(session.posargs),
                    env=environment)


def install_deepspeed(session):
    session.install(str(build_deepspeed(session)), "-c", pin_torch(session), env=DEEPSPEED_ENV)


def build_library(session):
    """Build our wheel from a copy of the sources: setuptools would take stale files from a `build` folder."""
    wheels = fresh_folder(pathlib.Path(session.virtualenv.location) / "wheel-of-this-tree")
    with tempfile.TemporaryDirectory() as folder:
        for name in PACKAGED:
            copy_into(ROOT / name, pathlib.Path(folder) / name)
        session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(wheels), folder)
    return only_wheel(wheels)


def build_deepspeed(session):
    """The wheel of DeepSpeed, built once from its source distribution and kept in nox's cache."""
    wheels = session.cache_dir / DEEPSPEED.replace("==", "-")
    if not list(wheels.glob("*.whl")):
        session.run("python",
                    "-m",
                    "pip",
                    "wheel",
                    "--quiet",
                    "--no-deps",
                    "-w",
                    str(wheels),
                    DEEPSPEED,
                    env=DEEPSPEED_ENV)
    return only_wheel(wheels)


def fresh_folder(path):
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def copy_into(source, target):
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def only_wheel(folder):
    wheel, = folder.glob("*.whl")
    return wheel


@contextlib.contextmanager
def outside_repository(session):
    """Run in an empty folder: from the repository root Python would import the sources instead of the wheel."""
    with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
        yield


def require_installed_library(session):
    script = ("import importlib.util, pathlib, sysconfig; "
              "found = pathlib.Path(importlib.util.find_spec('deepspeed.checkpoint.affine').origin); "
              "assert found.is_relative_to(sysconfig.get_path('purelib')), found; "
              "assert found.name == '__init__.py', found")
    session.run("python", "-c", script, env=RUN_ENV)


def pytest_arguments(posargs):
    """Paths given relative to the repository still mean that when pytest runs elsewhere."""
    arguments = []
    paths = 0
    for argument in posargs:
        path, separator, test = argument.partition("::")
        if path and (ROOT / path).exists():
            argument = f"{ROOT / path}{separator}{test}"
            paths += 1
        arguments.append(argument)
    return arguments if paths else [*arguments, str(ROOT / "tests" / "unit")]


def python_files(targets):
    files = []
    for target in targets:
        path = ROOT / target
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [str(path) for path in files]
