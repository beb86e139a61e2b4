# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The command `ds_affine verify`: do two checkpoints hold the same parameters, bit for bit?"""

import torch

from deepspeed.checkpoint.affine_adapters.checkpoints import open_checkpoint
from deepspeed.checkpoint.affine_transfer import plan_transfer
from deepspeed.checkpoint.affine_transfer_executor.checksums import WORDS
from ds_affine.choice import is_chosen
from ds_affine.tables import plain

# Elements that are compared at one time.
BLOCK = 1 << 22


def run(options):
    """Return 0 when all parameters are in both and equal, 1 when not."""
    checkpoints = [open_checkpoint(path) for path in (options.first, options.second)]
    first, second = (checkpoint.parameters for checkpoint in checkpoints)
    names = [name for name in to_compare(first, second) if is_chosen(name, options.include, options.exclude)]
    if not names:
        raise ValueError("there is no parameter to compare")
    dtype = getattr(torch, options.dtype) if options.dtype else None
    found = [(name, difference(first.get(name), second.get(name), dtype)) for name in names]
    for path, checkpoint in zip((options.first, options.second), checkpoints):
        for name, why in checkpoint.left_out.items():
            print(f"not compared: {plain(name)} of {path}: {why}")
    wrong = [(name, what) for name, what in found if what]
    for name, what in wrong:
        print(f"{plain(name)}: {what}")
    print(f"{len(names) - len(wrong)} of {len(names)} parameters are the same in {options.first} and {options.second}")
    return 1 if wrong else 0


def to_compare(first, second):
    """Names of both; of a tied parameter further ones only where both have them, as most formats store it once."""
    return [
        name for name in {
            **first,
            **second
        } if name in first and name in second or not (first.get(name) or second[name]).tied_to
    ]


def difference(one, other, dtype=None):
    """What tells two HeldParameters apart, in words; empty where nothing does. Nothing is put together for it.

    Floating-point parameters are compared as they would be stored in `dtype`, where one is given.
    """
    if one is None or other is None:
        return f"is only in {'B' if one is None else 'A'}"
    if one.layout.logical_shape != other.layout.logical_shape:
        return f"has shape {one.layout.logical_shape} in A and {other.layout.logical_shape} in B"
    casts = dtype is not None and one.dtype.is_floating_point and other.dtype.is_floating_point
    if one.dtype != other.dtype and not casts:
        return f"is {one.dtype} in A and {other.dtype} in B"
    # Each way, so that every replica of either is looked at.
    for source, target in ((one, other), (other, one)):
        plan = plan_transfer(target.layout, source.layout)
        if not all(
                _same(segment, source.buffers, target.buffers, dtype if casts else one.dtype)
                for segment in plan.segments):
            return "differs"
    return ""


def _same(segment, sources, targets, dtype):
    source = _blocks(sources[segment.source_rank], segment.source_offset, segment.source_strides, segment.shape, dtype)
    target = _blocks(targets[segment.target_rank], segment.target_offset, segment.target_strides, segment.shape, dtype)
    return all(torch.equal(*pair) for pair in zip(source, target))


def _blocks(tensor, offset, strides, shape, dtype):
    """The elements of a strided region in `dtype`, as integers of their width, some rows of it at a time."""
    flat = tensor.contiguous().view(-1).view(WORDS[tensor.element_size()])
    step = len(flat) // max(tensor.numel(), 1)
    view = flat.as_strided((*shape, step), (*(stride * step for stride in strides), 1),
                           flat.storage_offset() + offset * step)
    rows = view.reshape(1, -1) if view.dim() == 1 else view
    for block in rows.split(max(1, BLOCK * len(rows) // max(rows.numel(), 1))):
        yield block if dtype == tensor.dtype else block.contiguous().view(tensor.dtype).to(dtype).view(
            WORDS[dtype.itemsize])
