# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Memory of mapped files, which counts as the process' own until the kernel takes it back."""

import ctypes
import mmap
import os
import threading

# Linux 5.4; the module mmap has no name for it.
_MADV_PAGEOUT = 21


class Residents:
    """Tensors in mapped files that may be in memory, together about so many bytes. For several threads: whoever goes
    beyond the limit makes the others wait until memory is free.

    The kernel takes back pages only of files that the process owns or may write.

    Args:
        limit: bytes; None for as many as the kernel leaves there.
    """

    def __init__(self, limit):
        self._limit = limit
        self._tensors, self._numbytes = [], 0
        self._lock = threading.Lock()

    def add(self, tensors):
        """Say that tensors have been read or written, and will not be soon again.

        Raises:
            OSError: the kernel cannot be asked to take memory back.
        """
        if self._limit is None:
            return
        with self._lock:
            self._tensors.extend(tensors)
            self._numbytes += sum(tensor.nbytes for tensor in tensors)
            if self._numbytes > self._limit:
                for tensor in self._tensors:
                    _page_out(tensor)
                self._tensors, self._numbytes = [], 0


def _page_out(tensor):
    """Give memory back. What was written is written to the file first, and what is looked at again is read again, so
    this is harmless for memory that is in no file, too."""
    if not tensor.nbytes:
        return
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    library = ctypes.CDLL(None, use_errno=True)
    if library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_PAGEOUT):
        error = ctypes.get_errno()
        raise OSError(error, f'--memory takes Linux 5.4 or newer: {os.strerror(error)}')
