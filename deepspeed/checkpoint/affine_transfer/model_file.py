# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Store the plan of a model in one file, and read and prove one that nobody vouches for.

Beside a JSON header, which has the names, stand tables of numbers; see ``model_tables``.
"""

import json
from dataclasses import astuple

import numpy as np

from deepspeed.checkpoint.affine.checks import shown
from deepspeed.checkpoint.affine_transfer import parsing
from deepspeed.checkpoint.affine_transfer.archive import read_archive, write_archive
from deepspeed.checkpoint.affine_transfer.assemble import shard_numels
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError, InvalidMapError, naming
from deepspeed.checkpoint.affine_transfer.model import group_by_maps, sorted_names
from deepspeed.checkpoint.affine_transfer.model_plan import ModelPlan
from deepspeed.checkpoint.affine_transfer.model_tables import plan_of, tables_of
from deepspeed.checkpoint.affine_transfer.verify import check_plan

MODEL_PLAN_FORMAT = 'affine model plan'
MODEL_PLAN_FORMAT_VERSION = 1

_HEADER_KEYS = ('format', 'version', 'names', 'sources', 'process', 'balance')


def save_model_plan(plan, path):
    """Write a ``ModelPlan`` to one file. It appears whole or not at all; equal plans make equal files.

    Args:
        plan: what ``plan_transfers`` returns, for all processes or for one.
        path: where to; a file that is there is replaced.

    Raises:
        TypeError: anything but a ``ModelPlan``.
        OSError: the file cannot be written; what was there before is untouched.

    Example::

        save_model_plan(plan, 'plan.npz')
        plan = load_model_plan('plan.npz', transfers)
    """
    if not isinstance(plan, ModelPlan):
        raise TypeError(f'only a ModelPlan can be stored here, not a {type(plan).__name__}')
    header = {
        'format':
        MODEL_PLAN_FORMAT,
        'version':
        MODEL_PLAN_FORMAT_VERSION,
        'names':
        plan.names,
        'sources':
        [[place, source] for place, (name, source) in enumerate(zip(plan.names, plan.sources)) if source != name],
        'process':
        plan.process,
        'balance':
        plan.balance and astuple(plan.balance),
    }
    text = json.dumps(header, separators=(',', ':')).encode('ascii')
    write_archive(path, {'header': np.frombuffer(text, np.uint8), **tables_of(plan)})


def load_model_plan(path, transfers=None):
    """Read what ``save_model_plan`` wrote. The file is not trusted; memory is in proportion to its size.

    Args:
        transfers: mapping from parameter name to ``ParameterTransfer``. With it the plan is proved again: for every
            parameter it writes each target address once, from a location that holds the element. Where locations are
            is no part of the proof: compare ``plan.endpoints`` with your own.

    Returns:
        ``ModelPlan``.

    Raises:
        AffineTransferError: not such a file, or one of a newer version; or a plan of one process, which cannot be
            proved by itself.
        InvalidMapError: a plan that does not do what ``transfers`` ask for.
        OSError: a file that cannot be read.
    """
    stored = read_archive(path)
    header = _header(stored)
    plan = plan_of(header, stored)
    if transfers is not None:
        _prove(plan, transfers)
    return plan


def _header(stored):
    try:
        header = json.loads(stored['header'].tobytes().decode('ascii'))
    except (KeyError, ValueError, RecursionError):
        raise AffineTransferError('the file has no header that can be read; it is no model plan') from None
    if not isinstance(header, dict) or header.get('format') != MODEL_PLAN_FORMAT:
        raise AffineTransferError('the header does not say that this is a model plan')
    version = header.get('version')
    if type(version) is not int or version < 1:
        raise AffineTransferError(f'the model plan has the format version {shown(version)}; expected 1')
    if version > MODEL_PLAN_FORMAT_VERSION:
        raise AffineTransferError(f'the model plan has format version {shown(version)}, which is newer than version '
                                  f'{MODEL_PLAN_FORMAT_VERSION} that this release reads; upgrade deepspeed-affine')
    parsing.expect_keys(header, 'model plan header', _HEADER_KEYS)
    return header


def _prove(plan, transfers):
    if plan.process is not None:
        raise AffineTransferError(f'this is the plan of process {plan.process} alone. Only the plan of all processes '
                                  'shows whether each gets what it needs: load this one without transfers, or make it '
                                  'again with plan_transfers')
    names = sorted_names(transfers)
    for name in sorted({*names} ^ {*plan.names})[:1]:
        raise InvalidMapError(f'parameter {name!r} is in {"transfers" if name in transfers else "the plan"} only')
    for members in group_by_maps(transfers, names):
        variant_of = plan.variant_of[members]
        for member in members.tolist():
            _check_source(plan, names[member], transfers[names[member]])
        for place in np.unique(variant_of, return_index=True)[1].tolist():
            name = names[members[place]]
            with naming(name):
                _prove_parameter(plan, int(members[place]), transfers[name])


def _check_source(plan, name, entry):
    wanted = entry.source_name(name)
    if plan.source_of(name) != wanted:
        raise InvalidMapError(f'parameter {name!r} is read from {plan.source_of(name)!r} by the plan and from '
                              f'{wanted!r} by transfers')


def _prove_parameter(plan, place, entry):
    group = plan.classes[plan.variants[plan.variant_of[place]].number]
    if group.width != entry.width:
        raise InvalidMapError(f'the plan counts {group.width} bytes per element; its dtype has {entry.width}')
    for side, numels, part in (('source', group.source_numel, entry.source_map), ('target', group.target_numel,
                                                                                  entry.target_map)):
        if numels != shard_numels(part.columns):
            raise InvalidMapError(f'the plan has other {side} shards than the {side} map')
    moved = plan[plan.names[place]]
    if entry.scale_power != 1 and moved.columns.is_scaled.any():
        raise InvalidMapError('the plan rescales what is to be copied as it is; pass scale_power=1 for a parameter')
    check_plan(moved, entry.target_map, entry.source_map, partial_targets=entry.partial_targets)
