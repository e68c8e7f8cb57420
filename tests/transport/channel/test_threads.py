"""The threads that serve calls: which of them does what."""

from __future__ import annotations

import os
import select
import threading

from transport._channel.threads import ThreadPool

SECONDS = 30.0


class Source:
    """Has one job when it is polled, and as many as ``more`` when it is looked at."""

    def __init__(self, threads: ThreadPool, fd: int, more: int) -> None:
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


def test_a_thread_looks_again_at_the_source_of_its_job() -> None:
    threads = ThreadPool("looking", 4, lambda: None, lambda error: None)
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
