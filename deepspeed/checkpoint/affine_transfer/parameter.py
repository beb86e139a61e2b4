# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""One parameter of a model that is to be moved."""

from dataclasses import dataclass
from typing import Any, Optional

from deepspeed.checkpoint.affine.checks import shown
from deepspeed.checkpoint.affine.param_map import ParamAffineMap, as_map
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError

# Bytes; the widest element that torch has, complex128, takes 16.
_WIDEST = 64


@dataclass(frozen=True)
class ParameterTransfer:
    """Where one parameter comes from and where it goes.

    Parameters of equal shape and layout should share their map objects, or at least what ``relabel`` shares: a model
    has tens of geometries and tens of thousands of parameters, and each distinct geometry is looked at once.

    Args:
        target_map, source_map: the layouts.
        source_dtype: dtype of the source buffers, anything with an ``itemsize`` in bytes.
        target_dtype: dtype of the target buffers and of the bytes that travel. Default: the source's.
        source: name under which the source buffers are known, where it is not the parameter's own: a tied weight has
            one source and several targets.
        scale_power, partial_targets: as for ``plan_transfer``.

    Raises:
        TypeError: a map or an option of another type.
        AffineTransferError: a dtype without a usable ``itemsize``.
    """
    target_map: ParamAffineMap
    source_map: ParamAffineMap
    source_dtype: Any
    target_dtype: Any = None
    source: Optional[str] = None
    scale_power: Optional[int] = None
    partial_targets: bool = False

    def __post_init__(self):
        as_map(self.target_map, 'target_map')
        as_map(self.source_map, 'source_map')
        size = getattr(self.wire_dtype, 'itemsize', None)
        if type(size) is not int or not 1 <= size <= _WIDEST:
            raise AffineTransferError(f'{self.wire_dtype!r} is no dtype of a tensor: its itemsize is {shown(size)}; '
                                      f'expected 1 to {_WIDEST} bytes')
        if type(self.scale_power) not in (int, type(None)):
            raise TypeError(f'scale_power must be an int or None, but it is {shown(self.scale_power)}')
        if type(self.partial_targets) is not bool:
            raise TypeError(f'partial_targets must be a bool, but it is {shown(self.partial_targets)}')

    def source_name(self, name):
        """The name of the source buffers that the parameter ``name`` reads: its own, or another one's."""
        return name if self.source is None else self.source

    @property
    def wire_dtype(self):
        """dtype of the bytes that travel: a cast happens before sending."""
        return self.source_dtype if self.target_dtype is None else self.target_dtype

    @property
    def width(self):
        """Bytes per element on the wire."""
        return self.wire_dtype.itemsize
