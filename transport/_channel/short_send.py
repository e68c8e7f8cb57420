"""Non-blocking sends that hold the interpreter's lock.

A socket's ``send`` releases the lock around the system call, which might block. If a thread makes
or serves thousands of short calls, the lock then alternates between this thread and the reading
one, which costs more than the calls. A send that cannot block takes a few microseconds; other
threads get the lock after the interpreter's switch interval.
"""

from __future__ import annotations

import ctypes
import socket

SENT_BYTES = 4096
"""The lock is released for longer data, which take longer to copy."""

_send = ctypes.PyDLL(None).send  # a CDLL's would release the lock
# No argtypes: their conversion would take longer than a socket's whole method.
_send.restype = ctypes.c_ssize_t


class ShortSend:
    """Sends short data over ``sock``, a socket without TLS, with the interpreter's lock held."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, data: bytes | memoryview, flags: int, /) -> int:
        """Send as much of ``data`` as fits; ``flags`` must include ``MSG_DONTWAIT``.

        Returns the number of bytes. Raises the errors of ``socket.send``: BlockingIOError if none
        fit.
        """
        if len(data) <= SENT_BYTES and isinstance(data, bytes):
            # No other thread can close the socket, because the lock is held throughout.
            count: int = _send(self._sock.fileno(), data, ctypes.c_size_t(len(data)), flags)
            if count >= 0:
                return count
        return self._sock.send(data, flags)
