# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What to hand out beside a DeepSpeed that is newer than this library knows.

Python takes a package ``affine/`` for DeepSpeed's module ``affine.py`` in the same folder. A newer DeepSpeed may
import names from its module which this package does not have.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import warnings
from typing import Any, Dict, Tuple

NEWEST_TESTED = (0, 19, 8)
# Set to "ours", it keeps this library's module in use beside any DeepSpeed.
CHOICE = 'DEEPSPEED_AFFINE'


def newer_names() -> Dict[str, Any]:
    """The names of DeepSpeed's own module, where DeepSpeed is newer than those tested; else none.

    Warns:
        RuntimeWarning: DeepSpeed's own module is handed out.
    """
    package = pathlib.Path(__file__).resolve().parent
    sibling = package.with_suffix('.py')
    if os.environ.get(CHOICE) == 'ours' or not sibling.exists():
        return {}
    version = _version_beside(package.parents[2])
    if _numbers(version) <= NEWEST_TESTED:
        return {}
    tested = '.'.join(map(str, NEWEST_TESTED))
    warnings.warn(
        f'DeepSpeed {version} is newer than {tested}, the newest that deepspeed-affine was tested with, so '
        f'{__package__} is the module of DeepSpeed itself. Planner and executor of deepspeed-affine go on with its '
        f'own maps, which are in the modules of that package, such as {__package__}.constructors. Set {CHOICE}=ours '
        'to use them everywhere.',
        RuntimeWarning,
        stacklevel=3)
    return _names_of(sibling)


def _version_beside(site: pathlib.Path) -> str:
    """The version of the DeepSpeed that is installed into this folder; empty where none is known."""
    found = importlib.metadata.distributions(name='deepspeed', path=[str(site)])
    return next((distribution.version for distribution in found), '')


def _numbers(version: str) -> Tuple[int, ...]:
    """The leading numbers of a version.

    >>> _numbers('0.20.1+cpu')
    (0, 20, 1)
    """
    return tuple(int(part) for part in re.match(r'(?:\d+(?:\.\d+)*)?', version).group().split('.') if part)


def _names_of(path: pathlib.Path) -> Dict[str, Any]:
    # Under this package's name, so that what it defines is found again when it is unpickled.
    spec = importlib.util.spec_from_file_location(__package__, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {key: value for key, value in vars(module).items() if not (key.startswith('__') and key.endswith('__'))}
