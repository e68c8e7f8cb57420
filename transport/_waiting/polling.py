"""Threads that wait for descriptors together: a poll that several threads share, and its wakeup."""

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
"""The peer has closed its sending side. Where there is no such event, its end is read."""
_ONCE: int = getattr(select, "EPOLLONESHOT", 1 << 30)


class Wakeup:
    """A descriptor that becomes readable when it is notified.

    The descriptor is open as long as anything refers to the object. A finalizer or a late reply
    keeps the object alive while it notifies, so it never writes into a file that has taken over
    the number of a closed descriptor.
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
        with suppress(BlockingIOError):  # full: notified already
            os.write(self._writer, b"!")

    def clear(self) -> None:
        """Make the descriptor unreadable until the next ``notify``."""
        with suppress(BlockingIOError):
            while len(os.read(self.fd, 4096)) == 4096:
                pass


Poller = Union["select.epoll", "PollOnly"]


def can_be_polled(poller: Poller) -> TypeGuard[select.epoll]:
    """Return whether another poll can wait for ``poller``: it is itself a descriptor."""
    return hasattr(poller, "fileno")


def new_poller() -> Poller:
    """Return an object that many threads poll at once, with epoll's methods.

    ``once`` makes the events of ``register`` and ``modify`` be reported once, to one thread.
    """
    return select.epoll() if hasattr(select, "epoll") else PollOnly()


def once(events: int) -> int:
    """Return ``events`` such that one thread learns of them, once."""
    return events | _ONCE


class PollOnly:
    """The part of epoll that ``ThreadPool`` needs, over poll(2).

    One thread polls, and the others wait for their turn; a change wakes it. Each poll checks all
    descriptors, so it is for a few hundred connections at most.
    """

    def __init__(self) -> None:
        self._wanted: dict[int, int] = {}
        self._changing = threading.Lock()
        self._turn = threading.Lock()
        self._wakeup = Wakeup()
        self.closed: bool = False

    def register(self, fd: int, eventmask: int) -> None:
        """Poll ``fd`` for these events from now on."""
        with self._changing:
            self._wanted[fd] = eventmask
        self._wakeup.notify()

    modify = register

    def unregister(self, fd: int) -> None:
        """Poll ``fd`` no more."""
        with self._changing:
            self._wanted.pop(fd, None)
        self._wakeup.notify()

    def close(self) -> None:
        """Poll nothing any more."""
        with self._changing:
            self.closed = True
            self._wanted.clear()
        self._wakeup.notify()

    def poll(self, timeout: float, maxevents: int = sys.maxsize) -> list[tuple[int, int]]:
        """Return up to ``maxevents`` pairs of a descriptor and its events, after at most
        ``timeout`` seconds. Raises ValueError after ``close``, as epoll does.
        """
        if self.closed:
            raise ValueError("I/O operation on a closed poller")
        end = time.monotonic() + timeout
        if not self._turn.acquire(timeout=timeout):
            return []
        try:
            while True:
                found = self._look(max(end - time.monotonic(), 0.0), maxevents)
                if found or time.monotonic() >= end:
                    return found
        finally:
            self._turn.release()

    def _look(self, timeout: float, maxevents: int) -> list[tuple[int, int]]:
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
