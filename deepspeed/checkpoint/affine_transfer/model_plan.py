# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The plan of a whole model: a table of parameters over few distinct lists of segments."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Dict, Iterator, Optional, Tuple

import numpy as np

from deepspeed.checkpoint.affine_geometry.columns import row_ids
from deepspeed.checkpoint.affine_transfer.balance import BalanceReport
from deepspeed.checkpoint.affine_transfer.endpoints import TransferEndpoints
from deepspeed.checkpoint.affine_transfer.plan import TransferPlan
from deepspeed.checkpoint.affine_transfer.segments import SegmentColumns


@dataclass(frozen=True)
class PlannedClass:
    """What parameters of equal maps have in common: shape, buffer sizes in elements by location, bytes per element."""
    logical_shape: Tuple[int, ...]
    source_numel: Dict[int, int]
    target_numel: Dict[int, int]
    width: int


@dataclass(frozen=True)
class PlannedVariant:
    """Segments that some parameters of one class share; processes int64[S] of their ends."""
    number: int
    columns: SegmentColumns
    source_process: np.ndarray
    target_process: np.ndarray

    def take(self, rows):
        return PlannedVariant(self.number, self.columns.take(rows), self.source_process[rows],
                              self.target_process[rows])

    def of_process(self, process):
        """The segments that a process sends or receives."""
        return self.take((self.source_process == process) | (self.target_process == process))


@dataclass(frozen=True)
class LinkBytes:
    """Bytes from process to process: int64[K] each, by source and then target; local copies have equal ends."""
    source: np.ndarray
    target: np.ndarray
    numbytes: np.ndarray


@dataclass(frozen=True, eq=False)
class ModelPlan(Mapping):
    """The plans of all parameters, by name. As a mapping it gives a ``TransferPlan`` for each, made when asked for.

    Attributes:
        names: parameter names, ascending. sources: for each the name of the buffers that it reads.
        variant_of: int64[names], which of ``variants`` a parameter moves by.
        variants, classes: the distinct lists of segments, and what their parameters have in common.
        endpoints: where locations are. process: whose plan it is; None: everybody's.
        balance: what the policy ``balanced`` reached, else None.
    """
    names: Tuple[str, ...]
    sources: Tuple[str, ...]
    variant_of: np.ndarray
    variants: Tuple[PlannedVariant, ...]
    classes: Tuple[PlannedClass, ...]
    endpoints: TransferEndpoints
    process: Optional[int] = None
    balance: Optional[BalanceReport] = None

    def __len__(self):
        return len(self.names)

    def __repr__(self):
        whose = '' if self.process is None else f' of process {self.process}'
        return (f'ModelPlan{whose}: {len(self)} parameters, {self.segments} segments, '
                f'{sum(self.sent_bytes().values())} bytes to other processes')

    def __iter__(self):
        return iter(self.names)

    def __getitem__(self, name):
        place = self._place(name)
        variant = self.variants[self.variant_of[place]]
        group = self.classes[variant.number]
        return TransferPlan.from_columns(variant.columns, group.logical_shape, group.source_numel, group.target_numel)

    def source_of(self, name):
        """The name of the source buffers that a parameter reads: another one's for a tied weight."""
        return self.sources[self._place(name)]

    @property
    def segments(self):
        """Number of segments of all parameters."""
        return int((self._members() * np.array([len(variant.columns) for variant in self.variants], np.int64)).sum())

    def link_bytes(self):
        """Bytes on every link, as ``LinkBytes``."""
        source, target, numbytes = [], [], []
        for variant, members in zip(self.variants, self._members().tolist()):
            ids, first = row_ids(variant.source_process, variant.target_process)
            size = np.zeros(len(first), np.int64)
            np.add.at(size, ids, variant.columns.numel)
            source.append(variant.source_process[first])
            target.append(variant.target_process[first])
            numbytes.append(size * members * self.classes[variant.number].width)
        source, target, numbytes = (np.concatenate([np.zeros(0, np.int64), *parts])
                                    for parts in (source, target, numbytes))
        ids, first = row_ids(source, target)
        total = np.zeros(len(first), np.int64)
        np.add.at(total, ids, numbytes)
        return LinkBytes(source[first], target[first], total)

    def sent_bytes(self):
        """Bytes that each process sends to others, by process."""
        return self._by_process('source')

    def received_bytes(self):
        """Bytes that each process receives from others, by process."""
        return self._by_process('target')

    def local_bytes(self):
        """Bytes that are copied within a process, in all."""
        links = self.link_bytes()
        return int(links.numbytes[links.source == links.target].sum())

    def of_process(self, process) -> Iterator[Tuple[str, SegmentColumns]]:
        """What one process sends, receives or copies, parameter by parameter."""
        own = [variant.of_process(process).columns for variant in self.variants]
        for name, variant in zip(self.names, self.variant_of.tolist()):
            if len(own[variant]):
                yield name, own[variant]

    def of_link(self, source, target) -> Iterator[Tuple[str, SegmentColumns]]:
        """What one process sends to another, parameter by parameter."""
        own = [
            variant.columns.take((variant.source_process == source) & (variant.target_process == target))
            for variant in self.variants
        ]
        for name, variant in zip(self.names, self.variant_of.tolist()):
            if len(own[variant]):
                yield name, own[variant]

    def _place(self, name):
        place = bisect_left(self.names, name) if isinstance(name, str) else len(self.names)
        if place == len(self.names) or self.names[place] != name:
            raise KeyError(name)
        return place

    def _members(self):
        return np.bincount(self.variant_of, minlength=len(self.variants))

    def _by_process(self, end):
        links = self.link_bytes()
        remote = links.source != links.target
        process, where = np.unique(getattr(links, end)[remote], return_inverse=True)
        total = np.zeros(len(process), np.int64)
        np.add.at(total, where, links.numbytes[remote])
        return dict(zip(process.tolist(), total.tolist()))
