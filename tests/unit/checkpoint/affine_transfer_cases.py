# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Transfers with the buffers of each process, and what its targets must hold afterwards by the element oracle."""

import zlib
from dataclasses import dataclass, replace
from typing import Dict, List, Tuple

import numpy as np
import torch

from affine_oracle import (NOTHING, count, replicated_contents, shard_scales, split_contents, zero3_contents)
from affine_plans import same_bits, values
from deepspeed.checkpoint.affine import contiguous_split_map, replicated_map, zero3_partition_map
from deepspeed.checkpoint.affine_transfer import ParameterTransfer, TransferEndpoints, plan_transfers
from deepspeed.checkpoint.affine_transfer_executor import compile_transfer

# What is in a target before anything arrives.
UNTOUCHED = 0xA5
# How a buffer lies in memory.
DENSE, OFFSET, GAPS, TURNED = range(4)


@dataclass(frozen=True)
class Case:
    """A model to be moved.

    Attributes:
        transfers: name -> ParameterTransfer.
        contents: name -> contents of the source shards and of the target shards, as the oracle has them.
        endpoints: where locations are.
        nodes: process -> node, or None.
    """
    transfers: Dict[str, ParameterTransfer]
    contents: Dict[str, Tuple[dict, dict]]
    endpoints: TransferEndpoints
    nodes: dict = None

    def plan(self, process=None, policy='local_first_least_loaded'):
        return plan_transfers(self.transfers,
                              endpoints=self.endpoints,
                              nodes=self.nodes,
                              replica_policy=policy,
                              process=process)

    def source_dtype(self, name: str) -> torch.dtype:
        return self.transfers[name].source_dtype

    def target_dtype(self, name: str) -> torch.dtype:
        return self.transfers[name].wire_dtype

    def full(self, source: str, seed: int) -> torch.Tensor:
        """The parameter's values in run ``seed``, flat: any bits, but numbers where arithmetic is done with them."""
        readers = [entry for name, entry in self.transfers.items() if entry.source_name(name) == source]
        dtype, numel = readers[0].source_dtype, count(readers[0].source_map.logical_shape)
        seed += zlib.crc32(source.encode()) % 10**6
        if all(entry.wire_dtype == dtype and entry.scale_power is None for entry in readers):
            return values(numel, dtype, seed)
        generator = torch.Generator().manual_seed(seed)
        kind = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(numel, generator=generator, dtype=kind).to(dtype)

    def sources(self, process: int, seed: int, lie: int = DENSE) -> Dict[str, Dict[int, torch.Tensor]]:
        """The source buffers of a process with the values of run ``seed``."""
        buffers: Dict[str, Dict[int, torch.Tensor]] = {}
        for name, entry in self.transfers.items():
            full = self.full(entry.source_name(name), seed)
            scales = shard_scales(entry.source_map)
            for location, ids in self.contents[name][0].items():
                if self.endpoints.source[location] == process:
                    held = laid(len(ids), full.dtype, lie)
                    held.copy_(_shard(full, ids, scales[location]).view(held.shape))
                    buffers.setdefault(entry.source_name(name), {})[location] = held
        return buffers

    def refill(self, buffers: Dict[str, Dict[int, torch.Tensor]], process: int, seed: int) -> None:
        """Give source buffers the values of another run."""
        for name, by_location in self.sources(process, seed).items():
            for location, held in by_location.items():
                mine = buffers[name][location]
                mine.copy_(held.view(mine.shape))

    def targets(self, process: int, lie: int = DENSE) -> Dict[str, Dict[int, torch.Tensor]]:
        """The untouched target buffers of a process."""
        buffers: Dict[str, Dict[int, torch.Tensor]] = {}
        for name in self.transfers:
            for location, ids in self.contents[name][1].items():
                if self.endpoints.target[location] == process:
                    buffers.setdefault(name, {})[location] = laid(len(ids), self.target_dtype(name), lie)
        return buffers

    def expected(self, process: int, seed: int) -> Dict[str, Dict[int, torch.Tensor]]:
        """What the targets of a process hold after run ``seed``, flat."""
        found: Dict[str, Dict[int, torch.Tensor]] = {}
        for name, entry in self.transfers.items():
            full = self.full(entry.source_name(name), seed)
            scales = shard_scales(entry.target_map)
            for location, ids in self.contents[name][1].items():
                if self.endpoints.target[location] == process:
                    values_ = _shard(full, ids, scales[location])
                    found.setdefault(name, {})[location] = _kept(values_.to(self.target_dtype(name)), ids)
        return found

    def wrong(self, targets, process: int, seed: int) -> List[Tuple[str, int]]:
        """Targets of a process that do not hold exactly what they must after run ``seed``."""
        return differing(targets, self.expected(process, seed))

    def compile(self, process: int, sources, targets, group=None, plan=None, endpoints=None, **options):
        return compile_transfer(self.plan() if plan is None else plan,
                                sources,
                                targets,
                                self.endpoints if endpoints is None else endpoints,
                                options.pop('dtype', self.source_dtype),
                                target_dtype=options.pop('target_dtype', self.target_dtype),
                                group=group,
                                timeout=options.pop('timeout', 600.0),
                                **options)


def differing(buffers, wanted) -> List[Tuple[str, int]]:
    """Names and locations of buffers that do not have the wanted bits."""
    return [(name, location) for name, by_location in wanted.items() for location, values_ in by_location.items()
            if not same_bits(flat(buffers[name][location]), values_)]


def flat(held: torch.Tensor) -> torch.Tensor:
    """A copy of one axis. The stride of a single element may be anything, and then its bytes have no view."""
    return held.reshape(-1).clone(memory_format=torch.contiguous_format)


def copied(buffers) -> Dict[str, Dict[int, torch.Tensor]]:
    """What buffers hold now, flat."""
    return {
        name: {
            location: flat(held)
            for location, held in by_location.items()
        }
        for name, by_location in buffers.items()
    }


def laid(numel: int, dtype: torch.dtype, lie: int) -> torch.Tensor:
    """An untouched buffer of ``numel`` elements."""

    def untouched(elements: int) -> torch.Tensor:
        return torch.full((elements * dtype.itemsize, ), UNTOUCHED if dtype != torch.bool else 1,
                          dtype=torch.uint8).view(dtype)

    if lie == OFFSET:
        return untouched(numel + 7)[3:3 + numel]
    if lie == GAPS:
        return untouched(2 * numel)[::2]
    if lie == TURNED and numel % 2 == 0:
        return untouched(numel).view(2, numel // 2).t()
    return untouched(numel)


def _shard(full: torch.Tensor, ids: np.ndarray, scales: np.ndarray) -> torch.Tensor:
    """What a shard stores of a flat parameter; anything where it stores something else."""
    width = full.dtype.itemsize
    if not full.numel():
        return laid(len(ids), full.dtype, DENSE)
    rows = full.view(torch.uint8).view(-1, width)[torch.from_numpy(np.maximum(ids, 0))]
    held = rows.reshape(-1).view(full.dtype)
    if (scales[ids != NOTHING] == 1.0).all():
        return held
    factors = torch.from_numpy(np.where(np.isnan(scales), 1.0, scales)).to(torch.float32)
    return (held.to(torch.float32) * factors).to(full.dtype)


def _kept(held: torch.Tensor, ids: np.ndarray) -> torch.Tensor:
    """The same with all elements untouched that are no part of the parameter."""
    width = held.dtype.itemsize
    rows = held.contiguous().view(torch.uint8).view(-1, width).clone() if held.numel() else held.view(torch.uint8)
    if held.numel():
        rows[torch.from_numpy(np.flatnonzero(ids == NOTHING))] = UNTOUCHED if held.dtype != torch.bool else 1
    return rows.reshape(-1).view(held.dtype)


# A small model that has a bit of everything


def everything(endpoints: TransferEndpoints, size: int = 1) -> Case:
    """Two source and two target locations; ``size`` multiplies the elements of its large parameters.

    Partitions to columns and to rows, a weight that is tied to another, one that is cast, one of integers, one that
    both targets need whole, one with an empty source shard and one that sources hold by halves.
    """
    transfers, contents = {}, {}

    def add(name, to, from_, dtype=torch.float32, **options):
        transfers[name] = ParameterTransfer(to[0], from_[0], dtype, **options)
        contents[name] = from_[1], to[1]

    tall, wide = (10 * size, 6), (7, 8 * size)
    add('embed', _split(tall, (3, 3), 1), _zero3(tall))
    add('head', _split(tall, (6 * size, 4 * size), 0), _zero3(tall), source='embed')
    for layer in range(2):
        add(f'layers.{layer}.w', _split(wide, (4, 3), 0), _zero3(wide), torch.bfloat16)
    add('cast', _split(wide, (3 * size, 5 * size), 1), _zero3(wide), target_dtype=torch.bfloat16)
    add('steps', _replicated((5, )), _zero3((5, )), torch.int64)
    add('norm', _replicated((3, )), _zero3((3, )))
    add('row', _zero3((1, 4)), _split((1, 4), (1, 0), 0), torch.uint8)
    add('halves', _replicated((6, )), _replicated((6, ), 0.5), scale_power=1)
    return Case(transfers, contents, endpoints)


def _zero3(shape):
    return zero3_partition_map(shape, 2), zero3_contents(shape, 2)


def _split(shape, sizes, dim):
    return contiguous_split_map(shape, sizes, dim), split_contents(shape, sizes, dim)


def _replicated(shape, scale=1.0):
    return replicated_map(shape, 2, scale), replicated_contents(shape, 2)


def only(case: Case, *names: str) -> Case:
    """The case with some of its parameters."""
    return replace(case,
                   transfers={name: case.transfers[name]
                              for name in names},
                   contents={name: case.contents[name]
                             for name in names})
