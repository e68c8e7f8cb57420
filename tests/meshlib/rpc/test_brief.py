"""Short sends and receives: as a socket's own, but nobody else runs meanwhile."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import sysconfig
import threading
from collections.abc import Generator

import pytest

from meshlib.rpc.wire.brief import RECEIVED_BYTES, SENT_BYTES, Brief

FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Generator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def receive(sock: socket.socket, nbytes: int) -> bytes:
    memory = bytearray(nbytes)
    count = Brief(sock).recv_into(memoryview(memory), 0, FLAGS)
    return bytes(memory[:count])


@pytest.mark.parametrize("nbytes", [1, SENT_BYTES, SENT_BYTES + 1])
def test_what_is_sent_arrives(pair: Pair, nbytes: int) -> None:
    data = bytes(i % 251 for i in range(nbytes))  # zeros are bytes like others
    for sent in data, memoryview(data):
        assert Brief(pair[0]).send(sent, FLAGS) == nbytes
        assert receive(pair[1], nbytes + 1) == data


def test_what_is_received_goes_where_it_is_to_go_and_no_further(pair: Pair) -> None:
    pair[0].sendall(b"abcdef")
    memory = bytearray(b"........")
    assert Brief(pair[1]).recv_into(memoryview(memory)[2:6], 0, FLAGS) == 4
    assert memory == b"..abcd.."
    memory.append(0)  # which raises while anybody still refers to its bytes
    assert receive(pair[1], RECEIVED_BYTES + 1) == b"ef"


def test_where_it_would_have_to_wait_it_says_so(pair: Pair) -> None:
    with pytest.raises(BlockingIOError):
        receive(pair[1], 8)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 1 << 30:
            sent += Brief(pair[0]).send(b"x" * SENT_BYTES, FLAGS)
    assert sent < 1 << 30
    found = 0
    while found < sent:
        found += len(receive(pair[1], RECEIVED_BYTES))
    assert found == sent


def test_the_end_is_told_as_a_socket_tells_it(pair: Pair) -> None:
    pair[1].close()
    assert receive(pair[0], 8) == b""
    with pytest.raises(BrokenPipeError):
        Brief(pair[0]).send(b"x", FLAGS)


@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="no such lock")
def test_no_other_thread_runs_meanwhile(pair: Pair) -> None:
    brief, memory = Brief(pair[0]), memoryview(bytearray(8))
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 100_000))

    def attempt() -> bool:
        ran = list[int]()
        begin, over = threading.Event(), threading.Event()

        def wait() -> None:
            begin.wait()
            ran.append(1)
            over.set()

        threading.Thread(target=wait, daemon=True).start()
        begin.set()
        with pytest.raises(BlockingIOError):
            brief.recv_into(memory, 0, 0)  # which waits, as it does nowhere else
        alone = not ran
        assert over.wait(60)
        return alone

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        # Somebody else may have asked for the lock when another interval was set.
        assert any(attempt() for _ in range(5))
    finally:
        sys.setswitchinterval(interval)
