# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Beside a DeepSpeed newer than those tested: a stand-in release whose own modules need names that we lack."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import deepspeed.checkpoint.affine.piece as piece_of_ours

OURS = pathlib.Path(piece_of_ours.__file__).resolve().parents[1]
PACKAGES = ('affine', 'affine_geometry', 'affine_transfer', 'affine_transfer_executor', 'affine_adapters')
STAND_IN = {
    'deepspeed/__init__.py':
    'from deepspeed.checkpoint.engine import LAYOUT\n',
    'deepspeed/checkpoint/__init__.py':
    '',
    'deepspeed/checkpoint/constants.py':
    'WORD = "from DeepSpeed"\n',
    'deepspeed/checkpoint/engine.py':
    'from deepspeed.checkpoint.affine import ParamAffineMap, brand_new\n'
    'LAYOUT = brand_new()\n',
    'deepspeed/checkpoint/affine.py':
    'from .constants import WORD\n'
    'class ParamAffineMap:\n    pass\n'
    'def brand_new():\n    return WORD\n',
}
PROBE = '''
import json, pickle, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import deepspeed
    import deepspeed.checkpoint.affine as affine
    from deepspeed.checkpoint.affine.constructors import contiguous_split_map, replicated_map
    from deepspeed.checkpoint.affine_transfer import plan_transfer
    from deepspeed.checkpoint.affine_transfer_executor import apply_plan
import torch
whole = torch.arange(6.).view(2, 3)
targets = {0: torch.zeros(2, 2), 1: torch.zeros(2, 1)}
plan = plan_transfer(contiguous_split_map((2, 3), [2, 1], 1), replicated_map((2, 3), 1))
apply_plan(plan, {0: whole}, targets)
print(json.dumps({
    "layout": getattr(deepspeed, "LAYOUT", None),
    "has_new": hasattr(affine, "brand_new"),
    "map": pickle.loads(pickle.dumps(affine.ParamAffineMap)).__module__,
    "exact": torch.equal(torch.cat([targets[0], targets[1]], 1), whole),
    "warnings": [str(item.message) for item in caught if "deepspeed-affine" in str(item.message)],
}))
'''


def site_with(folder, version, files):
    """A site directory that holds a DeepSpeed of this version and our packages."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for package in PACKAGES:
        shutil.copytree(OURS / package, folder / 'deepspeed/checkpoint' / package)
    metadata = folder / f'deepspeed-{version}.dist-info' / 'METADATA'
    metadata.parent.mkdir()
    metadata.write_text(f'Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n')
    return folder


def probe(site, **environment):
    return subprocess.run([sys.executable, '-c', PROBE],
                          cwd=site,
                          env=dict(os.environ, PYTHONPATH=str(site), **environment),
                          capture_output=True,
                          text=True,
                          timeout=240)


@pytest.mark.parametrize('version', ['0.19.9', '0.20.0', '1.0.0rc1', '0.19.8.1'])
def test_a_newer_release_gets_its_own_module_and_ours_goes_on(tmp_path, version):
    done = probe(site_with(tmp_path, version, STAND_IN))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found['layout'] == 'from DeepSpeed' and found['has_new'] and found['exact']
    assert found['map'] == 'deepspeed.checkpoint.affine'
    warning, = found['warnings']
    assert f'DeepSpeed {version} is newer than 0.19.8' in warning and 'DEEPSPEED_AFFINE=ours' in warning


def test_told_so_ours_stays_in_use(tmp_path):
    files = dict(STAND_IN)
    del files['deepspeed/checkpoint/engine.py']
    files['deepspeed/__init__.py'] = ''
    done = probe(site_with(tmp_path, '0.20.0', files), DEEPSPEED_AFFINE='ours')
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found['has_new'] and found['exact'] and found['warnings'] == []
    assert found['map'] == 'deepspeed.checkpoint.affine.param_map'


def test_beside_a_tested_release_ours_is_in_use(tmp_path):
    files = dict(STAND_IN)
    files['deepspeed/__init__.py'] = ''
    done = probe(site_with(tmp_path, '0.19.8', files))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found['has_new'] and found['exact'] and found['warnings'] == []
