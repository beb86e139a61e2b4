# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Read files of ``torch.save`` that DeepSpeed wrote: memory-mapped, and without running code from them."""

import pickle
import threading
from contextlib import contextmanager

import torch

from deepspeed.checkpoint.affine_adapters.stored import CheckpointError, check_regular


def load_mapped(path):
    """Read a file whose tensors stay on disk until they are looked at.

    The file is not trusted: only plain values, tensors and the four classes that DeepSpeed's own checkpoints hold are
    made, and for the latter stand-ins without behaviour, so DeepSpeed need not be installed.

    Args:
        path: of a file in the zip format that ``torch.save`` has written since torch 1.6.

    Returns:
        What was saved; tensors are views of the mapped file, and writing to them does not change it.

    Raises:
        CheckpointError: no such file, a truncated one, or one with anything else inside.

    Example::

        load_mapped('global_step10/mp_rank_00_model_states.pt')['module']
    """
    check_regular(path)
    try:
        with _only(_STAND_INS):
            return torch.load(path, map_location='cpu', mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f'{path}: there is no such file.') from None
    except OSError as error:
        raise CheckpointError(f'{path}: {error.strerror or error}') from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f'{path}: holds what no checkpoint of DeepSpeed holds, and loading it might run code of '
                              f'the file: {_gist(error)}') from error
    except Exception as error:
        # Of any kind: a truncated pickle fails in every way there is.
        raise CheckpointError(f'{path}: is truncated or no file of torch.save: {_gist(error)}') from error


class _StandIn:
    """A value of a class of DeepSpeed's; its state is that of the real one."""

    def __init__(self, value=None):
        self.value = value


def _stand_in(module, name):
    return type(name, (_StandIn, ), {'__module__': module})


_STAND_INS = [
    _stand_in('deepspeed.runtime.zero.config', 'ZeroStageEnum'),
    _stand_in('deepspeed.runtime.fp16.loss_scaler', 'LossScaler'),
    _stand_in('deepspeed.runtime.fp16.loss_scaler', 'DynamicLossScaler'),
    _stand_in('deepspeed.utils.tensor_fragment', 'fragment_address'),
]

# torch keeps one list for all threads.
_LOCK = threading.Lock()


@contextmanager
def _only(classes):
    """Let torch make these classes besides plain values, and nothing that the program has allowed elsewhere. Other
    threads that call ``torch.load`` meanwhile have the same list."""
    with _LOCK:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(classes)
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _gist(error):
    """The line of an error that says what was wrong; torch adds a page of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line for word in ('GLOBAL', 'Unsupported', 'blocked'))]
    return (telling or lines or [type(error).__name__])[0]
