# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a live model holds of one parameter, and which of a model's names are one tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Optional

import torch

from deepspeed.checkpoint.affine.algebra import relabel
from deepspeed.checkpoint.affine.checks import shown
from deepspeed.checkpoint.affine.param_map import ParamAffineMap


@dataclass(frozen=True, eq=False)
class HeldParameter:
    """How a parameter (or buffer) of a live model lies in the processes of a job, and this process' part of it. Or how
    one lies in the files of a checkpoint, and all of it.

    Attributes:
        layout: ``ParamAffineMap``, with the same locations on every process that describes the same replicas.
        buffers: ``{location: tensor}``, what this process holds: detached views, so they show the values as they are
            after every optimizer step. Empty where this process holds nothing.
        dtype: dtype of the buffers of every process.
        tied_to: None; or, for a further name of a tied parameter, the name under which the model has it first. Their
            layout and buffers are one and the same.

    Example, planning and moving a model to layouts ``targets`` and buffers ``received``, both by name::

        held = zero3_maps(engine)
        plan = plan_transfers({name: ParameterTransfer(target_map=targets[name], source_map=one.layout,
                                                       source_dtype=one.dtype, source=one.tied_to)
                               for name, one in held.items()}, endpoints=endpoints)
        execute_transfers([TransferRequest(plan[name], one.buffers, received[name], name=name, dtype=one.dtype)
                           for name, one in held.items()], endpoints, torch.bfloat16)
    """
    layout: ParamAffineMap
    buffers: Mapping = field(repr=False)
    dtype: torch.dtype
    tied_to: Optional[str] = None

    def relabelled(self, new_ids):
        """The same under other location ids: ``new_ids`` maps old to new ids, and what it does not name is kept.

        Parameters that become one on the other side, such as q, k and v, need locations that differ.

        Raises:
            ValueError: as for ``relabel``.
        """
        return replace(self,
                       layout=relabel(self.layout, new_ids),
                       buffers={
                           new_ids.get(location, location): tensor
                           for location, tensor in self.buffers.items()
                       })


def module_of(engine_or_module):
    """The model itself: its names are those of the parameters before an engine took it.

    Raises:
        TypeError: neither engine nor module.
    """
    is_engine = hasattr(engine_or_module, 'zero_optimization_stage')
    module = engine_or_module.module if is_engine else engine_or_module
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f'expected what deepspeed.initialize returned, or a module, but this is {shown(module)}')
    return module


def describe_each(named, key, describe):
    """``{name: describe(name, tensor)}``, asking once for all names of a tied tensor.

    Args:
        named: pairs of name and tensor, every name of a tied one among them.
        key: from a tensor to what tied ones have in common.
        describe: returns a HeldParameter, or None for a tensor to leave out.
    """
    first_name, described = {}, {}
    for name, tensor in named:
        first = first_name.setdefault(key(tensor), name)
        if first == name:
            held = describe(name, tensor)
            if held is not None:
                described[name] = held
        elif first in described:
            described[name] = replace(described[first], tied_to=first)
    return described
