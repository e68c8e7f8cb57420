"""Sending that never waits, without letting go of the interpreter's lock.

A socket's own ``send`` lets go of the lock around the system call, for it might wait. A thread that
makes or serves thousands of short calls so offers it thousands of times to the one that reads
beside it, and both then spend more time on handing it to and fro than on the calls. Where nothing
is waited for, a few microseconds with the lock are cheaper; other threads have their turn after the
interpreter's switch interval, as beside any program that computes.
"""

from __future__ import annotations

import ctypes
import socket

SENT_BYTES = 4096
"""What has more is copied for longer, and others may run meanwhile."""

_send = ctypes.PyDLL(None).send  # a CDLL's would let go of the lock
# Arguments whose types are given take longer to convert than a socket's method takes at all.
_send.restype = ctypes.c_ssize_t


class Brief:
    """Sends what is short over ``sock``, a plain one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, data: bytes | memoryview, flags: int, /) -> int:
        """Send what the peer takes of ``data``, with ``MSG_DONTWAIT`` among the ``flags``.

        Returns how many bytes. Raises what a socket's own method does: BlockingIOError if it would
        have to wait.
        """
        if len(data) <= SENT_BYTES and isinstance(data, bytes):
            # Nobody closes it between these two, as they are made with the lock.
            count: int = _send(self._sock.fileno(), data, ctypes.c_size_t(len(data)), flags)
            if count >= 0:
                return count
        return self._sock.send(data, flags)
