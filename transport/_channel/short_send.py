"""Non-blocking sends that keep the interpreter's lock.

A socket's own ``send`` releases the lock around the system call, since it might block. A thread
that makes or serves thousands of short calls then offers the lock as often to the thread that reads
beside it. Both spend more time on passing the lock than on the calls. A send that cannot
block takes a few microseconds; other threads get the lock after the interpreter's switch interval.
"""

from __future__ import annotations

import ctypes
import socket

SENT_BYTES = 4096
"""Longer data take longer to copy, so the lock is released for them."""

_send = ctypes.PyDLL(None).send  # a CDLL's would release the lock
# Declared argument types take longer to convert than a socket's method takes as a whole.
_send.restype = ctypes.c_ssize_t


class ShortSend:
    """Sends short data over ``sock``, a socket without TLS, with the interpreter's lock held."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, data: bytes | memoryview, flags: int, /) -> int:
        """Send what the peer takes of ``data``, with ``MSG_DONTWAIT`` among the ``flags``.

        Returns the number of bytes. Raises the errors of ``socket.send``: BlockingIOError if the
        peer takes none.
        """
        if len(data) <= SENT_BYTES and isinstance(data, bytes):
            # Nobody closes the socket in between: the lock is held throughout.
            count: int = _send(self._sock.fileno(), data, ctypes.c_size_t(len(data)), flags)
            if count >= 0:
                return count
        return self._sock.send(data, flags)
