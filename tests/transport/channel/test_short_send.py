"""Short sends: as a socket's own, but nobody else runs meanwhile."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import sys
import sysconfig
import threading
from collections.abc import Generator

import pytest

from transport._channel.short_send import SENT_BYTES, ShortSend

FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Generator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("nbytes", [1, SENT_BYTES, SENT_BYTES + 1])
def test_what_is_sent_arrives(pair: Pair, nbytes: int) -> None:
    data = bytes(i % 251 for i in range(nbytes))  # zeros are bytes like others
    for sent in data, memoryview(data):
        assert ShortSend(pair[0]).send(sent, FLAGS) == nbytes
        assert pair[1].recv(nbytes + 1) == data


def fill(sock: socket.socket) -> int:
    """Send until nothing is taken any more; return how many bytes were."""
    sent, short = 0, ShortSend(sock)
    with contextlib.suppress(BlockingIOError):
        while sent < 1 << 30:
            sent += short.send(b"x" * SENT_BYTES, FLAGS)
    return sent


def test_it_returns_false_instead_of_waiting(pair: Pair) -> None:
    sent = fill(pair[0])
    assert sent < 1 << 30
    pair[0].close()
    assert sum(map(len, iter(lambda: pair[1].recv(1 << 20), b""))) == sent


def test_the_end_is_reported_as_by_a_socket(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        ShortSend(pair[0]).send(b"x", FLAGS)


class Refusing(socket.socket):
    def send(self, *_: object) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise BlockingIOError(errno.EAGAIN, "asked the socket")


@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="no such lock")
def test_no_other_thread_runs_meanwhile(pair: Pair) -> None:
    fill(pair[0])
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 100_000))

    def attempt(short: ShortSend) -> bool:
        ran = list[int]()
        begin, over = threading.Event(), threading.Event()

        def wait() -> None:
            begin.wait()
            ran.append(1)
            over.set()

        threading.Thread(target=wait, daemon=True).start()
        begin.set()
        with pytest.raises(BlockingIOError, match="asked the socket"):
            short.send(b"x", 0)  # which waits, as it does nowhere else
        alone = not ran
        assert over.wait(60)
        return alone

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        with Refusing(fileno=pair[0].detach()) as sock:
            # Somebody else may have asked for the lock when another interval was set.
            assert any(attempt(ShortSend(sock)) for _ in range(5))
    finally:
        sys.setswitchinterval(interval)
