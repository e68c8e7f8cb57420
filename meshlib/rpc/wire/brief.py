"""Sending and receiving that never waits, without letting go of the interpreter's lock.

A socket's own methods let go of the lock around each system call, for it might wait. A thread that
makes or serves thousands of short calls so offers it thousands of times to the one that reads
beside it, and both then spend more time on handing it to and fro than on the calls. Where nothing
is waited for, a few microseconds with the lock are cheaper; other threads have their turn after the
interpreter's switch interval, as beside any program that computes.
"""

from __future__ import annotations

import ctypes
import os
import socket

SENT_BYTES = 4096
RECEIVED_BYTES = 128 << 10
"""What has more is copied for longer, and others may run meanwhile."""

_library = ctypes.PyDLL(None, use_errno=True)  # a CDLL would let go of the lock
_send, _recv = _library.send, _library.recv
_send.restype = _recv.restype = ctypes.c_ssize_t
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Brief:
    """``sock``, a plain one, for what is short: with ``MSG_DONTWAIT`` among the flags.

    Raises what the socket's own methods raise: BlockingIOError where it would have to wait. Nobody
    may close the socket meanwhile.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._fd = sock.fileno()

    def send(self, data: bytes | memoryview, flags: int, /) -> int:
        """Send what the peer takes of ``data``; return how many bytes."""
        if len(data) > SENT_BYTES or not isinstance(data, bytes):
            return self._sock.send(data, flags)
        count: int = _send(self._fd, data, len(data), flags)
        if count < 0:
            raise _error()
        return count

    def recv_into(self, buffer: memoryview, nbytes: int, flags: int, /) -> int:
        """Receive what is there into ``buffer``, which is of bytes; return how many, 0 at the end.

        ``nbytes`` is 0, as for a socket that is to fill the buffer.
        """
        size = len(buffer)
        if size > RECEIVED_BYTES:
            return self._sock.recv_into(buffer, nbytes, flags)
        into = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        count: int = _recv(self._fd, into, size, flags)
        if count < 0:
            raise _error()
        return count


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
