# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Small models whose parameters share layouts, for tests of whole-model planning."""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from hypothesis import strategies as st

import affine_strategies
from affine_oracle import check_plan, replicated_contents
from deepspeed.checkpoint.affine import ParamAffineMap, contiguous_split_map, replicated_map
from deepspeed.checkpoint.affine_transfer import ParameterTransfer, SegmentColumns, TransferEndpoints, plan_transfers
from deepspeed.checkpoint.affine_transfer import verify


@dataclass(frozen=True)
class Model:
    """Transfers by parameter name, the layouts they were made of, and where locations are."""
    transfers: dict
    layouts: dict
    endpoints: TransferEndpoints
    nodes: dict

    @property
    def processes(self):
        return sorted({*self.endpoints.source.values(), *self.endpoints.target.values()})

    def plan(self, policy, **options):
        return plan_transfers(self.transfers,
                              endpoints=self.endpoints,
                              replica_policy=policy,
                              nodes=self.nodes,
                              **options)

    def rebuilt(self, every=1):
        """The same model in another order, with every second map, say, read from what a checkpoint stores."""
        copies = {}
        for index, (name, entry) in enumerate(reversed(self.transfers.items())):
            if index % every == 0:
                entry = replace(entry, source_map=_copy(entry.source_map), target_map=_copy(entry.target_map))
            copies[name] = entry
        return replace(self, transfers=copies)

    def shared(self):
        """The same model, in which equal maps are one object."""
        pool = {}
        shared = {
            name:
            replace(entry,
                    source_map=pool.setdefault(entry.source_map, entry.source_map),
                    target_map=pool.setdefault(entry.target_map, entry.target_map))
            for name, entry in self.transfers.items()
        }
        return replace(self, transfers=shared)

    def check(self, plan):
        """Every parameter's plan is exact, by the element oracle and by the library's own proof."""
        assert list(plan) == sorted(self.transfers)
        for name, entry in self.transfers.items():
            source, target = self.layouts[name]
            check_plan(plan[name], target.contents, source.contents)
            verify.check_plan(plan[name], entry.target_map, entry.source_map)
            assert plan.source_of(name) == (entry.source or name)


def _copy(affine_map):
    return ParamAffineMap.from_dict(affine_map.to_dict())


def same_columns(one, other):
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(SegmentColumns))


def same_plans(one, other):
    """Whether two model plans say the same in everything that a plan says."""
    tables = ((one.names, one.sources, one.endpoints, one.process, one.balance),
              (other.names, other.sources, other.endpoints, other.process, other.balance))
    return tables[0] == tables[1] and all(one[name] == other[name] for name in one.names)


def replica_model(sizes, holders, count, columns=4):
    """Parameters with rows that some processes hold whole each, read in stretches of rows by one more process each."""
    rows = sum(sizes)
    entry = ParameterTransfer(contiguous_split_map((rows, columns), sizes, 0), replicated_map((rows, columns),
                                                                                              holders), torch.bfloat16)
    endpoints = TransferEndpoints({location: location
                                   for location in range(holders)},
                                  {reader: holders + reader
                                   for reader in range(len(sizes))})
    return Model({f'layer.{index}': entry for index in range(count)}, {}, endpoints, None)


RENUMBERINGS = {
    'as they are': lambda location: location,
    'shifted': lambda location: location + 1000,
    'descending': lambda location: 5000 - location,
    'negative': lambda location: -location - 1,
}


@st.composite
def models(draw, scaled=True):
    """Models of 3 to 12 parameters over a few shapes; some are scaled, share maps, or are relabelled."""
    pairs = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(affine_strategies.shapes(max_axes=3))
        sources = draw(st.lists(affine_strategies.layouts(shape), min_size=1, max_size=2))
        targets = draw(st.lists(affine_strategies.layouts(shape), min_size=1, max_size=2))
        pairs += [(source, target, None) for source in sources for target in targets]
    if scaled and draw(st.booleans()):
        shape = draw(affine_strategies.shapes(max_axes=2))
        scales = st.sampled_from([1.0, 0.5, 2.0])
        pairs.append(
            (draw(affine_strategies.scaled_layouts(shape,
                                                   scales)), draw(affine_strategies.scaled_layouts(shape, scales)), 1))
    transfers, layouts = {}, {}
    for index in range(draw(st.integers(3, 12))):
        source, target, power = draw(st.sampled_from(pairs))
        source, target = (_renumbered(layout, draw(st.sampled_from(sorted(RENUMBERINGS))))
                          for layout in (source, target))
        # Names whose order is not that of their numbers.
        name = f'{index * 7 % 13}.weight'
        dtypes = draw(st.sampled_from([(torch.float32, None), (torch.float32, torch.bfloat16)]))
        transfers[name] = ParameterTransfer(target.map, source.map, *dtypes, scale_power=power)
        layouts[name] = source, target
    endpoints = TransferEndpoints(_processes(draw, [pair[0] for pair in layouts.values()], 0, 4),
                                  _processes(draw, [pair[1] for pair in layouts.values()], 3, 7))
    nodes = draw(st.sampled_from([None, lambda process: process // 2, lambda process: process % 3]))
    return Model(transfers, layouts, endpoints, nodes and {process: nodes(process) for process in range(8)})


@st.composite
def contested_models(draw):
    """Up to 12 parameters of equal maps; their slabs have different numbers of holders."""
    slabs = []
    for index in range(draw(st.integers(1, 3))):
        copies = draw(st.integers(1, 5))
        shape = draw(st.integers(1, 4)), 2
        slab = affine_strategies.Layout('replicated', replicated_map(shape, copies),
                                        replicated_contents(shape, copies))
        slabs.append(affine_strategies.relabelled(slab, {old: 10 * index + old for old in range(copies)}))
    source = affine_strategies.concatenation_of(slabs, 0)
    target = draw(affine_strategies.replicated(source.shape) | affine_strategies.splits(source.shape))
    entry = ParameterTransfer(target.map, source.map, torch.float32)
    names = [f'{index}.weight' for index in range(draw(st.integers(1, 12)))]
    nodes = draw(st.sampled_from([None, lambda process: process // 2]))
    return Model(dict.fromkeys(names, entry), dict.fromkeys(names, (source, target)),
                 TransferEndpoints(_processes(draw, [source], 0, 5), _processes(draw, [target], 4, 8)), nodes
                 and {process: nodes(process)
                      for process in range(9)})


def _renumbered(layout, how):
    if how == 'as they are':
        return layout
    return affine_strategies.relabelled(layout, {old: RENUMBERINGS[how](old) for old in layout.contents})


def _processes(draw, layouts, low, high):
    """A process for every location: several may share one."""
    ids = sorted({location for layout in layouts for location in layout.contents})
    numbers = np.random.RandomState(draw(st.integers(0, 2**16))).randint(low, high + 1, len(ids))
    return dict(zip(ids, numbers.tolist()))
