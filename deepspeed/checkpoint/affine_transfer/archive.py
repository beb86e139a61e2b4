# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Numbers in one file: an uncompressed ``.npz`` archive of one-dimensional arrays, read without trust.

numpy's own reader evaluates the header of an array and allocates what it asks for. Here a header must be, to the
letter, one that numpy writes for the few types in use, and an array as long as what is stored.
"""

import io
import os
import re
import struct
import zipfile
from pathlib import Path
from uuid import uuid4

import numpy as np

from deepspeed.checkpoint.affine.checks import shown
from deepspeed.checkpoint.affine_transfer.errors import AffineTransferError

_MAX_MEMBERS = 64
_MAGIC = b'\x93NUMPY\x01\x00'
_HEADER = re.compile(rb"\{'descr': '([|]i1|[|]u1|<i2|<i4|<i8|<f8)', 'fortran_order': False, "
                     rb"'shape': \((0|[1-9][0-9]{0,17}),\), \} *\n")
_INTEGERS = ('<i1', '<i2', '<i4', '<i8')


def write_archive(path, arrays):
    """Write arrays to a file, which appears whole or not at all, and takes the place of one that is there.

    Args:
        arrays: mapping from name to an array of one dimension: uint8, float64, or int64, which is stored in the
            narrowest type of integers that holds its values. Equal arrays make equal files.
    """
    path = Path(path)
    beside = path.with_name(f'{path.name}.{uuid4().hex}.tmp')
    try:
        with open(beside, 'xb') as file:
            np.savez(file, **{name: _narrowed(array) for name, array in arrays.items()})
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_archive(path):
    """Return the arrays of a file by name, as they are stored.

    Raises:
        AffineTransferError: not such a file. It takes no more memory than twice its size to find that out.
        OSError: a file that cannot be read.
    """
    content = Path(path).read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            _check_members(members, len(content))
            stored = [(member.filename, archive.read(member)) for member in members]
    except (zipfile.BadZipFile, EOFError, OverflowError, RuntimeError, ValueError, struct.error) as error:
        raise AffineTransferError(f'{path} is no readable archive: {error}') from None
    return {name[:-len('.npy')]: _array(name, value) for name, value in stored}


def _narrowed(array):
    if array.dtype != np.int64:
        return array.astype(array.dtype.newbyteorder('<'))
    low, high = (int(array.min()), int(array.max())) if len(array) else (0, 0)
    fitting = (dtype for dtype in _INTEGERS if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)
    return array.astype(next(fitting))


def _check_members(members, size):
    """Refuse what is larger than the file that it is in, before any of it is read."""
    names = [member.filename for member in members]
    if len(names) > _MAX_MEMBERS or len(set(names)) != len(names):
        raise ValueError(f'it has {len(names)} members; expected at most {_MAX_MEMBERS}, each once')
    for member in members:
        if not member.filename.endswith('.npy'):
            raise ValueError(f'member {shown(member.filename)} is no array')
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(f'member {shown(member.filename)} is compressed')
    if sum(member.file_size for member in members) > size:
        raise ValueError('its members claim to be larger than the file')


def _array(name, value):
    start = len(_MAGIC) + 2
    stop = start + int.from_bytes(value[len(_MAGIC):start], 'little')
    header = _HEADER.fullmatch(value[start:stop])
    if not value.startswith(_MAGIC) or header is None:
        raise AffineTransferError(f'member {shown(name)} is no array of one dimension of integers or of float64')
    dtype, count = np.dtype(header[1].decode()), int(header[2])
    if stop + count * dtype.itemsize != len(value):
        raise AffineTransferError(f'member {shown(name)} claims {count} items of {dtype.itemsize} bytes, but it has '
                                  f'{len(value) - stop} bytes')
    return np.frombuffer(value, dtype, offset=stop)
