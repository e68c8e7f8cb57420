"""A server among strangers: they get nothing, change nothing, and stop nobody."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from transport._errors import AuthenticationError
from transport._net import acceptor as acceptor_module
from transport._net.acceptor import Acceptor
from transport._net.auth import Handshake, authenticate
from transport._net.sockets import listen, recv_exact
from transport._waiting.deadline import Deadline

SOON = 30.0


class Loop:
    """A selector loop in a thread around an Acceptor, which greets whoever passes."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        listener = listen()
        self.address = listener.getsockname()
        self.delivered: list[socket.socket] = []
        self.acceptor = Acceptor(listener, b"s", self.selector, self._deliver)
        self._stop, self._stopped = socket.socketpair()
        self.selector.register(self._stopped, selectors.EVENT_READ, lambda _: None)
        self._stopping = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _deliver(self, sock: socket.socket) -> None:
        self.delivered.append(sock)
        sock.send(b"welcome")

    def _run(self) -> None:
        while not self._stopping:
            for key, events in self.selector.select(self.acceptor.seconds_to_wait()):
                key.data(events)
            self.acceptor.expire()

    def close(self) -> None:
        self._stopping = True
        self._stop.send(b"!")
        self.thread.join(SOON)
        self.acceptor.close()
        for sock in (*self.delivered, self._stop, self._stopped):
            sock.close()
        self.selector.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def stranger(loop: Loop, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(loop.address, timeout=SOON)
    sock.sendall(data)
    return sock


def friend(loop: Loop) -> None:
    """Connect as a friend and be welcome."""
    with stranger(loop) as sock:
        authenticate(sock, b"s", Deadline.after(SOON), initiator=True)
        assert recv_exact(sock, 7, Deadline.after(SOON)) == b"welcome"


def is_dropped(sock: socket.socket) -> bool:
    sock.settimeout(SOON)
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            assert data != b"welcome"
    return True


def until(condition: object) -> None:
    deadline = Deadline.after(SOON)
    while not condition():  # type: ignore[operator]
        assert not deadline.expired
        time.sleep(0.005)


def test_friends_are_delivered(loop: Loop) -> None:
    for _ in range(3):
        friend(loop)
    assert len(loop.delivered) == 3
    assert loop.acceptor.pending == 0


def test_what_follows_the_proof_is_left_to_the_user(loop: Loop) -> None:
    with stranger(loop) as sock:
        handshake = Handshake(b"s", initiator=True)
        sock.sendall(handshake.start())
        answer = recv_exact(sock, 42, Deadline.after(SOON))
        sock.sendall(handshake.receive(answer) + b"first frame")
        assert len(recv_exact(sock, 39, Deadline.after(SOON))) == 39
        until(lambda: loop.delivered)
        loop.delivered[0].setblocking(True)
        assert loop.delivered[0].recv(100) == b"first frame"


@pytest.mark.parametrize(
    "data",
    [
        os.urandom(1000),
        b"meshlib\x00\xff" + bytes(100),
        Handshake(None, initiator=True).start(),
        Handshake(b"s", initiator=True).start() + bytes(32),
        Handshake(b"s", initiator=True).start() + bytes(1 << 20),
    ],
    ids=["noise", "another version", "no secret", "no proof", "more than a proof"],
)
def test_strangers_are_dropped(loop: Loop, data: bytes) -> None:
    with stranger(loop) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
        assert is_dropped(sock)
    friend(loop)
    assert len(loop.delivered) == 1


def test_the_silent_are_dropped_in_time(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    half = Handshake(b"s", initiator=True).start()
    with monkeypatch.context() as patch:
        patch.setattr(acceptor_module, "HANDSHAKE_SECONDS", 0.1)
        silent, slow, late = (stranger(loop, sent) for sent in (b"", half[:10], half))
        with silent, slow, late:
            assert all(map(is_dropped, (silent, slow, late)))
    assert loop.acceptor.pending == 0
    friend(loop)


def test_the_blocking_handshake_meets_the_other(loop: Loop) -> None:
    with stranger(loop) as sock, pytest.raises(AuthenticationError, match="another secret"):
        authenticate(sock, b"wrong", Deadline.after(SOON), initiator=True)


def test_ten_thousand_silent_connections(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are dropped for newer ones while friends come and go."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[socket.socket] = []
    try:
        for number in range(10_000):
            sock = socket.socket()
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(loop.address)
            held.append(sock)
            if len(held) > min(soft, hard) // 4:
                held.pop(0).close()
            if number % 1000 == 999:
                friend(loop)
        assert loop.acceptor.pending <= 1024
        assert loop.acceptor.pending <= soft // 4
    finally:
        for sock in held:
            sock.close()
    until(lambda: loop.acceptor.pending == 0)
    friend(loop)


def test_the_silent_go_before_those_who_greeted(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor_module, "HANDSHAKE_SECONDS", 10 * SOON)  # none goes for its age
    loop.acceptor._max_pending = 10
    with stranger(loop, Handshake(b"s", initiator=True).start()) as greeted:
        assert len(recv_exact(greeted, 42, Deadline.after(SOON))) == 42
        silent = [stranger(loop) for _ in range(30)]
        assert all(map(is_dropped, silent[:21]))
        until(lambda: loop.acceptor.pending == 10)  # the last is dropped before the newest is in
        greeted.setblocking(False)
        with pytest.raises(BlockingIOError):
            greeted.recv(1)
        for sock in silent:
            sock.close()


def test_a_shortage_of_descriptors(loop: Loop) -> None:
    """Pending strangers are dropped for descriptors; without any, accepting pauses and resumes."""
    friend(loop)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    sock = socket.socket()
    sock.setblocking(False)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        fill: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                fill.append(os.dup(sock.fileno()))
        with contextlib.suppress(BlockingIOError):
            sock.connect(loop.address)
        until(lambda: loop.acceptor._resume_at is not None)
        for fd in fill:
            os.close(fd)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    sock.setblocking(True)
    sock.settimeout(SOON)
    authenticate(sock, b"s", Deadline.after(SOON), initiator=True)
    sock.close()
    friend(loop)


@pytest.mark.parametrize(("data", "alarming"), [(b"", False), (b"x", True)])
def test_who_hangs_up_without_a_word_alarms_nobody(
    loop: Loop, caplog: pytest.LogCaptureFixture, data: bytes, alarming: bool
) -> None:
    with caplog.at_level(logging.DEBUG, "meshlib.transport"):
        sock = stranger(loop, data)
        until(lambda: loop.acceptor.pending == 1)
        sock.close()
        until(lambda: loop.acceptor.pending == 0)
        until(lambda: "refused a connection" in caplog.text)
    levels = [record.levelno for record in caplog.records if "refused" in record.message]
    assert levels == [logging.INFO if alarming else logging.DEBUG]


def test_closing_drops_the_pending() -> None:
    loop = Loop()
    with stranger(loop) as sock:
        until(lambda: loop.acceptor.pending == 1)
        loop.close()
        assert is_dropped(sock)
