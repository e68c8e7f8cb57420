"""One thread serves many: an error in what it does for one concerns nobody else."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Iterator

import pytest

from transport._errors import DistStoreError
from transport._net.event_loop import EventLoop
from transport._store import TCPStore, TCPStoreServer
from transport._store.commands import Op

SOON = 30.0


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.ERROR, "meshlib.transport"):
        yield caplog


def test_an_error_in_a_callback_ends_no_other(quiet: pytest.LogCaptureFixture) -> None:
    received, ended = threading.Event(), threading.Event()
    failures: list[int] = []
    bad, bad_end = os.pipe()
    good, good_end = os.pipe()

    def fail(_events: int) -> None:
        failures.append(1)
        raise RuntimeError("it is broken")

    def receive(_events: int) -> None:
        os.read(good, 10)
        received.set()

    loop = EventLoop("test", lambda: None, ended.set)
    loop.selector.register(bad, selectors.EVENT_READ, fail)
    loop.selector.register(good, selectors.EVENT_READ, receive)
    loop.start()
    os.write(bad_end, b"!")
    for _ in range(3):
        received.clear()
        os.write(good_end, b"!")
        assert received.wait(SOON)
    loop.stop()
    assert ended.is_set()
    assert failures == [1]  # it is not called for ever
    assert "a callback failed" in quiet.text
    assert "it is broken" in quiet.text
    for fd in (bad, bad_end, good, good_end):
        os.close(fd)


def test_an_error_in_what_is_due_ends_nothing(quiet: pytest.LogCaptureFixture) -> None:
    received = threading.Event()
    turns: list[int] = []

    def turn() -> float | None:
        turns.append(1)
        if len(turns) == 1:
            raise RuntimeError("not yet")
        return None

    ours, theirs = socket.socketpair()
    loop = EventLoop("test", turn, lambda: None)
    loop.selector.register(ours, selectors.EVENT_READ, lambda _: (ours.recv(10), received.set()))
    loop.start()
    theirs.send(b"!")
    assert received.wait(SOON)
    loop.stop()
    assert "not yet" in quiet.text
    ours.close()
    theirs.close()


def test_a_store_goes_on_for_its_other_clients(quiet: pytest.LogCaptureFixture) -> None:
    server = TCPStoreServer(secret=b"s")
    one, other = (TCPStore(*server.address, timeout=SOON, secret=b"s") for _ in range(2))

    def fail(_fields: object) -> None:
        raise RuntimeError("a bug")

    server._commands._at_once[Op.NUM_KEYS] = fail
    one.set_will("will", "gone")
    with pytest.raises(DistStoreError, match="connection is lost"):
        one.num_keys()
    assert other.get("will") == b"gone"
    assert "a bug" in quiet.text

    def starve(_fields: object) -> None:
        raise MemoryError

    server._commands._at_once[Op.NUM_KEYS] = starve
    with pytest.raises(DistStoreError, match="MemoryError"):
        other.num_keys()
    assert other.check(["will"])
    for store in (one, other):
        store.close()
    server.close()
