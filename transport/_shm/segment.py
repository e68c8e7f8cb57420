"""Shared memory: anonymous files, which have no names that could leak."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os

from transport._errors import DistBackendError
from transport._net.limits import explain, memory_left
from transport._shm.support import the_core

PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10

_STEP = 32 << 20
"""The bytes allocated at a time; in between, signals are handled and limits checked."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""No process can change a segment's size: reading past a reduced size would raise SIGBUS."""


class Segment:
    """A shared mapping of ``nbytes`` bytes.

    ``data`` are the bytes of ``mapping``, which must not be closed. In each process, the mapping
    lives as long as any reference to it: memory is never unmapped under an array. The kernel frees
    the memory when the last process has unmapped it or died.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        # Python would duplicate the descriptor for the lifetime of the mapping, and a job with
        # many groups has many mappings. So Python maps anonymous memory, and _map replaces it.
        self.mapping = mapping = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        _map(fd, self.address, nbytes)
        self.data = memoryview(mapping)

    def allocate(self, start: int, nbytes: int, members: int) -> None:
        """Allocate the pages of a part, while ``members`` members do so for their parts.

        Raises OSError if memory is short. Without this, the kernel would kill a process that
        writes there.
        """
        core = the_core()
        end = start + nbytes
        for at in range(start, end, _STEP):
            step = min(_STEP, end - at)
            left, limit = memory_left()
            # The other members may share the limit, and be about to allocate as much.
            if end - at + step * members > left:
                raise OSError(errno.ENOMEM, limit)
            core.allocate(self.mapping, at, step)


class OwnedSegment(Segment):
    """A segment that this process made and shares through its descriptor ``fd`` (-1: closed)."""

    fd = -1

    def __init__(self, nbytes: int, label: str) -> None:
        size = pages(nbytes)
        fd = -1
        try:
            # Only /proc/<pid>/maps shows the label; it need not be unique.
            fd = os.memfd_create(f"meshlib-{label}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            super().__init__(fd, size)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            why = explain(error)
            raise DistBackendError(f"cannot make {size} bytes of shared memory: {why}") from error
        self.fd = fd

    def close(self) -> None:
        """Close the descriptor. Mappings stay. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        self.close()


def adopt(fd: int) -> Segment:
    """Map the segment behind a descriptor from its owner, and close the descriptor.

    Raises DistBackendError if it is not shared memory of a sealed size.
    """
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise DistBackendError("a peer's shared memory can shrink; expected a sealed size")
        size = os.fstat(fd).st_size
        if size <= 0 or size % PAGE:
            raise DistBackendError(f"expected a segment of whole pages, got {size} bytes")
        return Segment(fd, size)
    except (OSError, ValueError) as error:
        raise DistBackendError(f"cannot map a peer's shared memory: {error}") from error
    finally:
        os.close(fd)


def no_memory(who: str, nbytes: int, error: OSError) -> DistBackendError:
    """Return the error for a member that cannot allocate ``nbytes`` bytes of shared memory."""
    why = error.strerror or str(error)
    if error.errno == errno.EFAULT:  # a write there would raise SIGBUS
        why = "the kernel has no page for it"
    return DistBackendError(
        f"{who} cannot allocate {nbytes} bytes of shared memory: {why}; share less, or raise the"
        " limit (docker --memory, Slurm --mem, Kubernetes limits.memory, vm.overcommit_memory)"
    )


def pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def _map(fd: int, address: int, nbytes: int) -> None:
    """Replace the mapping at ``address`` by one of a file. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    found = libc.mmap(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if found != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
