"""The kernel's side of waiting on shared memory: futex calls by way of ctypes, and a fence.

A futex is a 32-bit word in memory. ``wait`` blocks in the kernel, without the interpreter's lock,
until somebody calls ``wake`` for the same word, and returns at once if the word has changed
already. The words here are the lower halves of 64-bit counters (little-endian machines only).
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading

# The private variants know only one process; ours must work across several.
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
LOW_HALF = 2**32 - 1
_SYSCALL_NUMBERS = {"x86_64": 202}


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def unsupported_reason() -> str | None:
    """Return why counters in shared memory cannot be trusted on this machine, or None.

    Plain stores become visible in program order on x86-64 only. Other machines reorder them, and
    Python has no fence that orders them for another process.
    """
    if not sys.platform.startswith("linux"):
        return f"the shared-memory transport needs Linux, this is {sys.platform}"
    machine = platform.machine()
    if machine not in _SYSCALL_NUMBERS:
        return (
            "the shared-memory transport needs a machine that keeps the order of stores (x86-64),"
            f" this is {machine}"
        )
    if sys.maxsize != 2**63 - 1:
        return "the shared-memory transport needs a 64-bit interpreter"
    return None


class Futex:
    """Waits on and wakes counters of one mapping, which must stay mapped as long as this lives."""

    def __init__(self, address: int) -> None:
        self._address = address
        self._syscall = ctypes.CDLL(None, use_errno=False).syscall
        self._syscall.restype = ctypes.c_long
        self._number = ctypes.c_long(_SYSCALL_NUMBERS.get(platform.machine(), -1))

    def wait(self, word: int, seen: int, seconds: float) -> None:
        """Block while 64-bit word number ``word`` has the low half of ``seen``.

        At most for ``seconds``; may return early without reason. The caller looks again.
        """
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        self._syscall(
            self._number,
            ctypes.c_void_p(self._address + 8 * word),
            ctypes.c_long(_WAIT),
            ctypes.c_uint32(seen & LOW_HALF),
            ctypes.byref(limit),
        )

    def wake(self, word: int) -> None:
        """Wake everybody who waits on word number ``word``."""
        self._syscall(
            self._number,
            ctypes.c_void_p(self._address + 8 * word),
            ctypes.c_long(_WAKE),
            ctypes.c_long(_EVERYBODY),
        )


class Fence:
    """A full memory barrier for the calling thread, out of what the interpreter has.

    x86-64 lets a load overtake an earlier store to another address. Who publishes a counter and
    then looks whether anybody sleeps must not: the sleeper, doing the reverse, would be missed.
    Taking a lock is an atomic read-modify-write (a semaphore in CPython up to 3.12, an atomic
    exchange from 3.13), which nothing overtakes. One thread at a time uses an instance: the lock
    is always free.
    """

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """For those who call it very often: ``with lock: pass`` is the fence."""

    def __call__(self) -> None:
        """Return when all earlier stores of this thread are visible."""
        with self.lock:
            pass
