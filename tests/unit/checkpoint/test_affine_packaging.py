# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The wheel in fresh virtual environments: alone, next to DeepSpeed 0.19.8, and after it is uninstalled again."""

import email.parser
import hashlib
import zipfile

import pytest

from affine_environments import (REPOSITORY, FreshEnvironment, borrow_packages, deepspeed_wheel, library_wheel)

CORE = ("deepspeed.checkpoint.affine", "deepspeed.checkpoint.affine_adapters", "deepspeed.checkpoint.affine_geometry",
        "deepspeed.checkpoint.affine_transfer", "deepspeed.checkpoint.affine_transfer_executor")
DEEPSPEEDS_OWN = "deepspeed.checkpoint.affine"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return library_wheel(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def neighbour(tmp_path_factory):
    return deepspeed_wheel(tmp_path_factory.mktemp("deepspeed"))


@pytest.fixture(scope="module")
def borrowed(tmp_path_factory):
    return borrow_packages(tmp_path_factory.mktemp("borrowed"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory, borrowed, wheel):
    environment = FreshEnvironment(tmp_path_factory.mktemp("alone"), borrowed)
    environment.install(wheel)
    return environment


@pytest.fixture(scope="module", params=["ours first", "DeepSpeed first", "together"])
def beside(request, tmp_path_factory, borrowed, wheel, neighbour):
    environment = FreshEnvironment(tmp_path_factory.mktemp("beside"), borrowed)
    steps = {
        "ours first": [[wheel], [neighbour]],
        "DeepSpeed first": [[neighbour], [wheel]],
        "together": [[wheel, neighbour]],
    }
    for step in steps[request.param]:
        environment.install(*step)
    return environment


def package_file(environment, package):
    return str(environment.site.joinpath(*package.split("."), "__init__.py"))


def module_file(environment, module):
    return str(environment.site.joinpath(*module.split(".")).with_suffix(".py"))


# ------------------------------------------------------------------ the wheel


def test_wheel_holds_exactly_our_sources(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(REPOSITORY))
        for top in ("deepspeed", "ds_affine")
        for path in (REPOSITORY / top).rglob("*") if path.suffix in (".py", ".html")
    }
    assert packed == sources


def test_wheel_leaves_the_packages_above_ours_to_deepspeed(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    forbidden = {"deepspeed/__init__.py", "deepspeed/checkpoint/__init__.py"}
    assert not forbidden & set(names)
    allowed = tuple(f"{package.replace('.', '/')}/" for package in (*CORE, "ds_affine")) + ("deepspeed_affine-", )
    assert [name for name in names if not name.startswith(allowed)] == []


def test_wheel_needs_torch_and_numpy_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name, = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = email.parser.Parser().parsestr(archive.read(name).decode())
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(required) == ["numpy", "torch>=2.4"]
    assert metadata["Name"] == "deepspeed-affine"
    assert metadata["Requires-Python"] == ">=3.10"


# ------------------------------------------------------------------ without DeepSpeed


def test_alone_imports_through_namespace_packages(alone):
    origins = alone.probe("origins")
    assert origins.pop("deepspeed") is None
    assert origins.pop("deepspeed.checkpoint") is None
    assert origins == {package: package_file(alone, package) for package in (*CORE, "ds_affine")}


def test_alone_is_not_taken_for_deepspeed(alone):
    assert alone.probe("versions")["deepspeed"] is None
    assert alone.probe("is_deepspeed_available") == {"spec": True, "available": False}


def test_alone_works_in_a_spawned_process(alone):
    answer = alone.probe("worker")
    assert answer["exact"] and answer["exit"] == 0
    assert answer["process"] != answer["parent"]
    assert answer["file"] == package_file(alone, DEEPSPEEDS_OWN)


def test_help_loads_nothing_heavy(alone):
    assert alone.probe("help_imports") == {"code": 0, "loaded": []}


# ------------------------------------------------------------------ next to DeepSpeed


def test_beside_deepspeed_every_import_is_ours(beside):
    origins = beside.probe("origins")
    assert origins.pop("deepspeed") == package_file(beside, "deepspeed")
    assert origins.pop("deepspeed.checkpoint") == package_file(beside, "deepspeed.checkpoint")
    assert origins == {package: package_file(beside, package) for package in (*CORE, "ds_affine")}
    versions = beside.probe("versions")
    assert versions["deepspeed"] == "0.19.8"


def test_beside_deepspeed_its_call_sites_run_our_classes(beside):
    answer = beside.probe("call_sites")
    ours = str(beside.site.joinpath(*DEEPSPEEDS_OWN.split("."))) + "/"
    assert answer["affine"] == ours + "__init__.py"
    assert answer["same_class"] == [True, True]
    assert answer["derived_by"].startswith(ours)
    assert [path for path in answer["ran"] if path.startswith(ours)]
    assert module_file(beside, DEEPSPEEDS_OWN) not in answer["ran"]
    assert answer["merged"] == [[3. * row + column for column in range(3)] for row in range(5)]
    assert answer["restored"] == [9., 10., 11., 12., 13., 14.]


def test_beside_deepspeed_spawned_processes_run_our_classes(beside):
    answer = beside.probe("worker")
    assert answer["exact"] and answer["exit"] == 0
    assert answer["process"] != answer["parent"]
    assert answer["file"] == package_file(beside, DEEPSPEEDS_OWN)


def test_beside_deepspeed_help_loads_nothing_heavy(beside):
    assert beside.probe("help_imports") == {"code": 0, "loaded": []}


def test_no_file_belongs_to_both(beside):
    assert beside.record("deepspeed_affine") & beside.record("deepspeed") == set()


# ------------------------------------------------------------------ uninstalling


@pytest.fixture
def both(tmp_path, borrowed, wheel, neighbour):
    environment = FreshEnvironment(tmp_path / "both", borrowed)
    environment.install(neighbour)
    return environment


def source_hashes(environment, distribution):
    """Bytecode is left out: Python may rewrite it whenever it likes."""
    paths = [environment.site / name for name in environment.record(distribution) if not name.endswith(".pyc")]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_uninstall_brings_back_deepspeeds_own_module(both, wheel):
    before = source_hashes(both, "deepspeed")
    both.install(wheel)
    assert both.probe("call_sites")["affine"] == package_file(both, DEEPSPEEDS_OWN)
    assert source_hashes(both, "deepspeed") == before
    both.uninstall("deepspeed-affine")
    assert source_hashes(both, "deepspeed") == before
    answer = both.probe("call_sites")
    assert answer["affine"] == answer["derived_by"] == module_file(both, DEEPSPEEDS_OWN)
    assert answer["ran"] == [module_file(both, DEEPSPEEDS_OWN)]
    assert both.probe("origins")["deepspeed.checkpoint.affine_geometry"].startswith("ImportError")


def test_uninstalling_deepspeed_leaves_ours_working(both, wheel):
    both.install(wheel)
    both.uninstall("deepspeed")
    assert both.probe("origins")["deepspeed"] is None
    answer = both.probe("worker")
    assert answer["exact"] and answer["file"] == package_file(both, DEEPSPEEDS_OWN)
