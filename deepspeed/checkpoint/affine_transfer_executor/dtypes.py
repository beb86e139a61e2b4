# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Dtypes: what may be cast, what may be scaled, and the arithmetic of a segment."""

import torch

from deepspeed.checkpoint.affine.tensors import has_division
from deepspeed.checkpoint.affine_transfer_executor.errors import AffineTransferExecutionError


def check_dtypes(source: torch.dtype, target: torch.dtype, scaled: bool) -> None:
    """Require that values of ``source`` may become values of ``target``.

    Raises:
        AffineTransferExecutionError: not a dtype, a cast that is not between floating point dtypes or between
            complex ones, or a scale on a dtype that has no division.
    """
    for dtype in (source, target):
        if not isinstance(dtype, torch.dtype):
            raise AffineTransferExecutionError(f'{dtype!r} is not a torch.dtype')
    both_float = source.is_floating_point and target.is_floating_point
    if source != target and not both_float and not (source.is_complex and target.is_complex):
        raise AffineTransferExecutionError(f'sources of {source} cannot become targets of {target}: only floating '
                                           'point is cast to floating point, and complex to complex. Convert the '
                                           'sources yourself')
    if scaled and not has_division(source):
        raise AffineTransferExecutionError(f'the plan scales its segments, and {source} cannot be scaled')


def rescaled(values: torch.Tensor, source_scale: float, target_scale: float) -> torch.Tensor:
    """``values / source_scale * target_scale``, in the operations that rebuild and extract use.

    A factor of 1.0 is no operation, so that unscaled bits pass unchanged.
    """
    if source_scale != 1.0:
        values = values / source_scale
    if target_scale != 1.0:
        values = values * target_scale
    return values
