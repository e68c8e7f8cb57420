"""A poller for file descriptors that several threads share, and its wakeup."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from contextlib import suppress
from typing import TypeGuard, Union

READABLE, WRITABLE = select.POLLIN, select.POLLOUT
PEER_CLOSED: int = getattr(select, "POLLRDHUP", 0)
"""The peer has closed its sending side. Without this event, reading returns the end of the data."""
_ONCE: int = getattr(select, "EPOLLONESHOT", 1 << 30)


class Wakeup:
    """A file descriptor that ``notify`` makes readable.

    It stays open while the object has references. A finalizer or a late reply therefore cannot
    write to another file that has reused the descriptor's number.
    """

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._writer, False)

    def __del__(self) -> None:
        os.close(self.fd)
        os.close(self._writer)

    def notify(self) -> None:
        """Wake the polling thread. Takes no lock."""
        with suppress(BlockingIOError):  # A full pipe was notified already.
            os.write(self._writer, b"!")

    def clear(self) -> None:
        """Make the descriptor unreadable until the next ``notify``."""
        with suppress(BlockingIOError):
            while len(os.read(self.fd, 4096)) == 4096:
                pass


Poller = Union["select.epoll", "PollOnly"]


def can_be_polled(poller: Poller) -> TypeGuard[select.epoll]:
    """Return whether another poll can wait for ``poller``, because it has a file descriptor."""
    return hasattr(poller, "fileno")


def new_poller() -> Poller:
    """Return an object with epoll's methods that many threads can poll at once.

    With ``once``, events of ``register`` and ``modify`` are reported once, to one thread.
    """
    return select.epoll() if hasattr(select, "epoll") else PollOnly()


def once(events: int) -> int:
    """Return ``events`` with the flag that reports them once, to one thread."""
    return events | _ONCE


class PollOnly:
    """The part of epoll that ``ThreadPool`` needs, over poll(2).

    One thread polls while the others wait for their turn; a change wakes it. Each poll checks all
    descriptors, so this suits a few hundred connections at most.
    """

    def __init__(self) -> None:
        self._wanted: dict[int, int] = {}
        self._changing = threading.Lock()
        self._turn = threading.Lock()
        self._wakeup = Wakeup()
        self.closed: bool = False

    def register(self, fd: int, eventmask: int) -> None:
        """Start to poll ``fd`` for the events in ``eventmask``."""
        with self._changing:
            self._wanted[fd] = eventmask
        self._wakeup.notify()

    modify = register

    def unregister(self, fd: int) -> None:
        """Stop polling ``fd``."""
        with self._changing:
            self._wanted.pop(fd, None)
        self._wakeup.notify()

    def close(self) -> None:
        """Stop polling. Later calls of ``poll`` raise ValueError."""
        with self._changing:
            self.closed = True
            self._wanted.clear()
        self._wakeup.notify()

    def poll(self, timeout: float, maxevents: int = sys.maxsize) -> list[tuple[int, int]]:
        """Return up to ``maxevents`` pairs of a descriptor and its events within ``timeout``
        seconds. Raises ValueError after ``close``, as epoll does.
        """
        if self.closed:
            raise ValueError("I/O operation on a closed poller")
        end = time.monotonic() + timeout
        if not self._turn.acquire(timeout=timeout):
            return []
        try:
            while True:
                found = self._poll_once(max(end - time.monotonic(), 0.0), maxevents)
                if found or time.monotonic() >= end:
                    return found
        finally:
            self._turn.release()

    def _poll_once(self, timeout: float, maxevents: int) -> list[tuple[int, int]]:
        poller = select.poll()
        poller.register(self._wakeup.fd, READABLE)
        with self._changing:
            for fd, events in self._wanted.items():
                poller.register(fd, events & ~_ONCE)
        ready = poller.poll(timeout * 1000)
        found: list[tuple[int, int]] = []
        with self._changing:
            for fd, event in ready:
                if fd == self._wakeup.fd:
                    self._wakeup.clear()
                elif fd in self._wanted and len(found) < maxevents:
                    found.append((fd, event))
                    if self._wanted[fd] & _ONCE:
                        del self._wanted[fd]
        return found
