# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Dtypes: what may be cast, what may be scaled, and the arithmetic of a segment."""

from functools import lru_cache

import torch

from deepspeed.checkpoint.affine.tensors import has_division
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError


def check_dtypes(source: torch.dtype, target: torch.dtype, scaled: bool) -> None:
    """Require that values of ``source`` may become values of ``target``.

    Raises:
        AffineTransferExecutionError: a dtype that torch cannot copy, a cast that is not between floating point dtypes
            or between complex ones, or a scale on a dtype that has no division.
    """
    for dtype in (source, target):
        if not is_movable(dtype):
            raise AffineTransferExecutionError(f'tensors of {dtype} cannot be copied by torch; move the bytes as '
                                               'torch.uint8')
    both_float = source.is_floating_point and target.is_floating_point
    if source != target and not both_float and not (source.is_complex and target.is_complex):
        raise AffineTransferExecutionError(f'sources of {source} cannot become targets of {target}: only floating '
                                           'point is cast to floating point, and complex to complex. Convert the '
                                           'sources yourself')
    if scaled and not has_division(source):
        raise AffineTransferExecutionError(f'the plan scales its segments, and {source} cannot be scaled')


@lru_cache(maxsize=None)
def is_movable(dtype: torch.dtype) -> bool:
    """Whether torch can copy tensors of this dtype; those of less than 8 bits it cannot."""
    try:
        torch.empty(1, dtype=dtype, device='cpu').copy_(torch.empty(1, dtype=dtype, device='cpu'))
    except RuntimeError:
        return False
    return True


def rescaled(values: torch.Tensor, source_scale: float, target_scale: float) -> torch.Tensor:
    """``values / source_scale * target_scale``, in the operations that rebuild and extract use.

    A factor of 1.0 is no operation, so that unscaled bits pass unchanged.
    """
    if source_scale != 1.0:
        values = values / source_scale
    if target_scale != 1.0:
        values = values * target_scale
    return values
