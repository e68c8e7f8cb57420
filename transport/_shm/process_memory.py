"""Reading the private memory of another process, if the kernel allows it.

``process_vm_readv`` copies from another process's memory into this one's. Both processes must
belong to one user, and security modules must allow the call (Yama's ``ptrace_scope``, a
container's seccomp filter). No process writes into another one's private memory.

The kernel copies with the processor's string instruction. On AMD's Zen 3 and 4, that is slow if
the target begins a few bytes further into a page than the source (glibc bug 30994). This is common
for consecutive arrays from ``malloc``. Then the kernel copies a piece at a time into a bounce
buffer with a better alignment. NumPy copies the piece to the target while it is in the cache.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np

from transport._operands.flat import address
from transport._operands.reduce_op import Flat
from transport._shm.segment import PAGE

_PAGE_BITS = PAGE - 1
_CLOSE = 32
"""A copy is slow if its target begins 1 to 31 bytes further into a page than its source."""
_BOUNCED = 256 << 10
"""The size of the bounce buffer: it fits a core's cache, but makes kernel calls rare."""


class _Iovec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class ProcessMemory:
    """Reads the private memory of another process, or of this one. Thread-safe."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        libc = ctypes.CDLL(None, use_errno=True)
        self._readv = libc.process_vm_readv
        self._readv.restype = ctypes.c_ssize_t
        piece, count = ctypes.POINTER(_Iovec), ctypes.c_ulong
        self._readv.argtypes = (ctypes.c_int, piece, count, piece, count, count)

    def read(self, where: int, into: Flat) -> None:
        """Fill ``into`` with the bytes at address ``where`` of the process.

        Raises OSError if the process or the memory does not exist, or may not be read.
        """
        start, nbytes = address(into), into.nbytes
        if nbytes < _BOUNCED or not 0 < (start - where) & _PAGE_BITS < _CLOSE:
            self._copy(where, start, nbytes)
            return
        memory = np.empty(_BOUNCED + PAGE, np.uint8)
        # Half a page further into a page than the source is.
        first = (where + PAGE // 2 - address(memory)) & _PAGE_BITS
        raw = into.view(np.uint8)
        for done in range(0, nbytes, _BOUNCED):
            part = raw[done : done + _BOUNCED]
            piece = memory[first : first + part.size]
            self._copy(where + done, address(piece), part.size)
            np.bitwise_or(piece, piece, out=part)

    def _copy(self, where: int, start: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            here = _Iovec(start + done, nbytes - done)
            there = _Iovec(where + done, nbytes - done)
            count = self._readv(self.pid, here, 1, there, 1, 0)
            if count <= 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            done += count


def is_possible() -> bool:
    """True if the C library has the call; the kernel may still refuse it."""
    return hasattr(ctypes.CDLL(None), "process_vm_readv")
