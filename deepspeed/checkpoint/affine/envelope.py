# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a checkpoint keeps maps in: ``{'version': 1, 'params': {name: map}}``."""

from deepspeed.checkpoint.affine.checks import mapping, shown
from deepspeed.checkpoint.affine.param_map import ParamAffineMap, as_map
from deepspeed.checkpoint.affine.serialization import AFFINE_MAP_FORMAT_VERSION


def load_affine_maps(envelope):
    """Return a dict from parameter name to ``ParamAffineMap``.

    Args:
        envelope: a dict as ``dump_affine_maps`` returns it or a checkpoint of DeepSpeed holds it. It is not trusted.

    Raises:
        ValueError: another format version than 1, anything that is no envelope, a map that
            ``ParamAffineMap.from_dict`` refuses; the message names the parameter.

    Example::

        >>> maps = load_affine_maps({'version': 1, 'params': {'weight': replicated_map((4, ), 2).to_dict()}})
        >>> maps['weight'].logical_shape
        (4,)
    """
    if not isinstance(envelope, dict):
        raise ValueError(f'Affine maps are stored in a dict, but this is a {type(envelope).__name__}.')
    _check_version(envelope)
    unknown = [key for key in envelope if key not in ('version', 'params')]
    if unknown:
        raise ValueError(f'The affine maps have {len(unknown)} keys besides version and params, which format version '
                         f'{AFFINE_MAP_FORMAT_VERSION} does not know.')
    params = envelope.get('params')
    if not isinstance(params, dict):
        raise ValueError(f"The affine maps' params must be a dict from parameter name to map, but it is a "
                         f'{type(params).__name__}.')
    return {name: _load_map(name, entry) for name, entry in params.items()}


def dump_affine_maps(maps):
    """Return maps in the form that a checkpoint stores, in plain lists, dicts and numbers.

    Args:
        maps: mapping from parameter name to ``ParamAffineMap``.

    Raises:
        TypeError: anything else.
    """
    return {
        'version': AFFINE_MAP_FORMAT_VERSION,
        'params': {
            name: as_map(affine_map, f'The map of parameter {name!r}').to_dict()
            for name, affine_map in mapping(maps, 'maps').items()
        },
    }


def _check_version(envelope):
    if 'version' not in envelope:
        raise ValueError('The affine maps have no version, so they cannot be read safely.')
    version = envelope['version']
    if type(version) is not int:
        raise ValueError(f"The affine maps' version must be an integer, but it is a {type(version).__name__}.")
    if version > AFFINE_MAP_FORMAT_VERSION:
        raise ValueError(f'The affine maps have format version {shown(version)}, which is newer than version '
                         f'{AFFINE_MAP_FORMAT_VERSION} that this release reads; upgrade deepspeed-affine.')
    if version != AFFINE_MAP_FORMAT_VERSION:
        raise ValueError(f'The affine maps have format version {shown(version)}, but the first that was ever '
                         f'written is {AFFINE_MAP_FORMAT_VERSION}.')


def _load_map(name, entry):
    if not isinstance(name, str):
        raise ValueError(f'A parameter name of the affine maps must be a string, but one is a {type(name).__name__}.')
    try:
        return ParamAffineMap.from_dict(entry)
    except ValueError as error:
        raise ValueError(f'The affine map of parameter {name!r} is not valid. {error}') from error
