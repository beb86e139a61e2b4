# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Layouts of whole models: what a trainer holds and what a rollout wants.

Every function takes a mapping from parameter name to shape and returns ``(transfers, endpoints)``. Parameters of equal
layout share their maps. Trainers are the first processes, rollout processes come after them.
"""

import re

import torch

from deepspeed.checkpoint.affine import (contiguous_split_map, relabel, replicated_map, union_affine_maps,
                                         zero3_partition_map)
from deepspeed.checkpoint.affine_transfer import ParameterTransfer, TransferEndpoints

EXPERT = re.compile(r'\.experts\.(\d+)\.')
# The second projection of a pair is cut along its inputs, everything else along its outputs.
CUT_BY_COLUMNS = re.compile(r'\.(o_proj|down_proj)\.')


def zero3_to_tp(parameters, ranks, tp):
    """ZeRO-3 over ``ranks`` processes to one replica that is split over ``tp``."""
    layouts = Layouts()
    transfers = _transfers(parameters, lambda name, shape: layouts.tensor_parallel(name, shape, tp),
                           lambda shape: layouts.zero3(shape, ranks))
    return transfers, _endpoints(ranks, tp)


def rows_to_tp(parameters, ranks, tp):
    """Every parameter split by its rows over ``ranks`` processes, to one replica that is split over ``tp``."""
    layouts = Layouts()
    transfers = _transfers(parameters, lambda name, shape: layouts.tensor_parallel(name, shape, tp),
                           lambda shape: layouts.split(shape, ranks, 0))
    return transfers, _endpoints(ranks, tp)


def zero3_to_experts(parameters, ranks, tp, ep):
    """ZeRO-3 to ``ep`` groups of ``tp``: each expert is split over one group, the rest over every group."""
    layouts = Layouts()
    numbers = {name: int(found[1]) for name in parameters if (found := EXPERT.search(name))}
    per_group = -(-(max(numbers.values()) + 1) // ep)

    def target(name, shape):
        groups = (numbers[name] // per_group, ) if name in numbers else tuple(range(ep))
        return layouts.in_groups(name, shape, tp, groups)

    return _transfers(parameters, target, lambda shape: layouts.zero3(shape, ranks)), _endpoints(ranks, tp * ep)


def zero3_to_columns(parameters, ranks, parts):
    """ZeRO-3 over ``ranks`` processes to ``parts`` column shards, whatever the parameter."""
    layouts = Layouts()
    transfers = _transfers(parameters, lambda name, shape: layouts.split(shape, parts, 1),
                           lambda shape: layouts.zero3(shape, ranks))
    return transfers, _endpoints(ranks, parts)


def copies_to_tp(parameters, copies, tp):
    """``copies`` processes that hold all of the model each, to one replica that is split over ``tp``."""
    layouts = Layouts()
    transfers = _transfers(parameters, lambda name, shape: layouts.tensor_parallel(name, shape, tp),
                           lambda shape: layouts.replicated(shape, copies))
    return transfers, _endpoints(copies, tp)


def hybrid_to_tp(parameters, ranks, copies, tp):
    """ZeRO-3 within each of ``copies`` groups of ``ranks`` processes, to one replica that is split over ``tp``."""
    layouts = Layouts()
    transfers = _transfers(parameters, lambda name, shape: layouts.tensor_parallel(name, shape, tp),
                           lambda shape: layouts.hybrid(shape, ranks, copies))
    return transfers, _endpoints(ranks * copies, tp)


def even(size, parts):
    """Widths of parts that differ by one element at most."""
    return [size // parts + (part < size % parts) for part in range(parts)]


class Layouts:
    """Makes each distinct map once."""

    def __init__(self):
        self._made = {}

    def zero3(self, shape, ranks):
        return self._once(('zero3', shape, ranks), lambda: zero3_partition_map(shape, ranks))

    def hybrid(self, shape, ranks, copies):
        groups = [range(copy * ranks, (copy + 1) * ranks) for copy in range(copies)]
        return self._once(('hybrid', shape, ranks, copies),
                          lambda: zero3_partition_map(shape, ranks, locations=groups))

    def replicated(self, shape, copies):
        return self._once(('replicated', shape, copies), lambda: replicated_map(shape, copies))

    def split(self, shape, parts, dim):
        return self._once(('split', shape, parts, dim),
                          lambda: contiguous_split_map(shape, even(shape[dim], parts), dim))

    def tensor_parallel(self, name, shape, tp):
        """Vectors are replicated, but biases are cut as the rows that they are added to."""
        if len(shape) == 1 and not name.endswith('_proj.bias'):
            return self.replicated(shape, tp)
        return self.split(shape, tp, 1 if CUT_BY_COLUMNS.search(name) else 0)

    def in_groups(self, name, shape, tp, groups):
        """The same shards in every one of some groups; location ids count group by group."""
        one = self.tensor_parallel(name, shape, tp)

        def make():
            moved = [relabel(one, {part: group * tp + part for part in range(tp)}) for group in groups]
            return moved[0] if len(moved) == 1 else union_affine_maps(moved)

        return self._once(('groups', id(one), groups), make)

    def _once(self, key, make):
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _transfers(parameters, target, source):
    return {
        name: ParameterTransfer(target(name, tuple(shape)), source(tuple(shape)), torch.bfloat16)
        for name, shape in parameters.items()
    }


def _endpoints(trainers, readers):
    return TransferEndpoints({rank: rank
                              for rank in range(trainers)}, {rank: trainers + rank
                                                             for rank in range(readers)})
