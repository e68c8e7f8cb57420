"""Looking for a moment for what comes, before sleeping."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

import pytest

from meshlib.rpc.wire import patience
from meshlib.rpc.wire.patience import Patience
from meshlib.rpc.wire.threads import Threads

SECONDS = 30.0


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that goes on by what it is told, and by a fiftieth of a look when it is read."""
    now = [1000.0]

    def read() -> float:
        now[0] += patience.LOOK_SECONDS / 50
        return now[0]

    def go_on(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(patience.time, "perf_counter", read)
    return go_on


def nothing() -> None:
    raise BlockingIOError


def test_what_comes_within_a_moment_is_returned(passes: Callable[[float], None]) -> None:
    left = [2]

    def receive() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise BlockingIOError
        return "here"

    one = Patience()
    assert one.look(receive) == "here"
    passes(0.0)
    assert one.looks


def test_what_receiving_raises_is_raised() -> None:
    def receive() -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        Patience().look(receive)


def test_looking_in_vain_is_done_less_and_less_often(passes: Callable[[float], None]) -> None:
    one, pauses = Patience(), list[float]()
    for _ in range(9):
        assert one.looks
        assert one.look(nothing) is None
        waited = 0.0
        while not one.looks:
            passes(0.0005)
            waited += 0.0005
        pauses.append(waited)
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.002
    assert 0.05 < pauses[-1] < 0.08


def test_one_success_forgets_what_was_in_vain(passes: Callable[[float], None]) -> None:
    one = Patience()
    for _ in range(3):
        assert one.look(nothing) is None
        passes(1.0)
    assert one.look(lambda: "here") == "here"
    assert one.looks


class Source:
    """Has one job when it is polled, and as many as ``more`` when it is looked at."""

    def __init__(self, threads: Threads, fd: int, more: int) -> None:
        self.threads = threads
        self.fd = fd
        self.more = more
        self.by: list[str] = []
        self.looked_by: list[str] = []
        self.seen_all = threading.Event()

    def ready(self, events: int) -> None:
        self.threads.add(self.job)

    def look(self) -> bool:
        self.looked_by.append(threading.current_thread().name)
        if not self.more:
            self.seen_all.set()
            return False
        self.more -= 1
        self.threads.add(self.job)
        return True

    def job(self) -> None:
        self.by.append(threading.current_thread().name)


def test_a_thread_looks_where_its_job_came_from() -> None:
    threads = Threads("looking", 4, lambda: None)
    inward, outward = os.pipe()
    try:
        source = Source(threads, inward, more=3)
        threads.register(source, select.EPOLLIN)
        os.write(outward, b"!")
        assert source.seen_all.wait(SECONDS)
        assert source.by == source.by[:1] * 4
        assert source.looked_by == source.by
        threads.forget(source)
    finally:
        threads.close()
        os.close(inward)
        os.close(outward)
