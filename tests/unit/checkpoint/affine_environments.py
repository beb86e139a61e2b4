# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Fresh virtual environments for the packaging tests.

Python chooses between our package and DeepSpeed's module of the same name inside one site directory, so both are
installed there from wheels. torch and the rest are borrowed from the environment that runs the tests, through
links in a folder that comes last on the path and holds neither DeepSpeed nor us.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
PROBE = pathlib.Path(__file__).with_name("affine_installed_probe.py")
SOURCES = ("deepspeed", "ds_affine", "pyproject.toml", "setup.py", "README.md", "LICENSE")
NOT_BORROWED = ("deepspeed", "ds_affine", "__pycache__")


class FreshEnvironment:
    """A virtual environment in `folder` whose own site directory holds only what `install` puts there."""

    def __init__(self, folder, borrowed):
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.site = next((folder / "lib").glob("python*")) / "site-packages"
        (self.site / "zz_borrowed.pth").write_text(f"{borrowed}\n")

    def install(self, *wheels):
        """Dependencies must all be met by what is borrowed: nothing is fetched and nothing is replaced."""
        self._pip("install", "--quiet", "--no-index", *map(str, wheels))

    def uninstall(self, distribution):
        self._pip("uninstall", "--quiet", "--yes", distribution)

    def probe(self, name):
        """The answer of one function of affine_installed_probe.py, asked in a process of this environment."""
        output = self._run([str(self.python), str(PROBE), name])
        return json.loads(output.splitlines()[-1])

    def record(self, distribution):
        """The paths that the installed distribution owns, relative to the site directory."""
        folder, = self.site.glob(f"{distribution}-*.dist-info")
        rows = (folder / "RECORD").read_text().splitlines()
        return {row.rsplit(",", 2)[0].strip('"') for row in rows}

    def _pip(self, *arguments):
        self._run([sys.executable, "-m", "pip", "--python", str(self.python), *arguments])

    def _run(self, command):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", PYTHONNOUSERSITE="1")
        with tempfile.TemporaryDirectory() as elsewhere:
            done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout


def borrow_packages(folder):
    """Link everything of the running environment except DeepSpeed and our own packages into `folder`."""
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in pathlib.Path(site).iterdir():
            if not entry.name.startswith(NOT_BORROWED) and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)
    return folder


def library_wheel(folder):
    """The wheel named by AFFINE_WHEEL, else one built from this tree."""
    given = os.environ.get("AFFINE_WHEEL")
    if given:
        return pathlib.Path(given)
    sources = folder / "sources"
    sources.mkdir()
    for name in SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, sources / name)
    return _build(folder, str(sources))


def deepspeed_wheel(folder):
    """The wheel named by AFFINE_DEEPSPEED_WHEEL, else one built from DeepSpeed's source distribution."""
    given = os.environ.get("AFFINE_DEEPSPEED_WHEEL")
    return pathlib.Path(given) if given else _build(folder, "deepspeed==0.19.8")


def _build(folder, requirement):
    wheels = folder / "wheels"
    environment = dict(os.environ, DS_BUILD_OPS="0")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(wheels), requirement]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=240)
    wheel, = wheels.glob("*.whl")
    return wheel
