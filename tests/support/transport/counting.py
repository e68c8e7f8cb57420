"""Links that count what is sent over them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transport._calls.call import Call
from transport._choosing.choice import Thresholds
from transport._communicators.runtime import Membership
from transport._inproc.communicator import InprocCommunicator, InprocLink
from transport._link import Link, Request


@dataclass
class Count:
    """What all ranks of a group have sent."""

    frames: int = 0
    bytes: int = 0
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.frames += 1
            self.bytes += nbytes


class CountingLink(Link):
    """Counts what it sends, then lets another link send it."""

    def __init__(self, inner: InprocLink, count: Count) -> None:
        self.peer = inner.peer
        self.inner = inner
        self._count = count

    def post_send(self, call: Call, data: memoryview, tag: int = 0) -> Request:
        self._count.add(data.nbytes)
        return self.inner.post_send(call, data, tag)

    def post_recv(self, call: Call, into: memoryview, tag: int = 0) -> Request:
        return self.inner.post_recv(call, into, tag)


def counting(
    count_of: Callable[[int, int], Count],
) -> Callable[[Membership, Thresholds], InprocCommunicator]:
    """Return what makes communicators that count what ``rank`` sends to ``peer`` in
    ``count_of(rank, peer)``.
    """

    class CountingCommunicator(InprocCommunicator):
        def link(self, peer: int, call: Call) -> Any:
            return CountingLink(super().link(peer, call), count_of(self.rank, peer))

    def make(membership: Membership, table: Thresholds) -> InprocCommunicator:
        return CountingCommunicator(membership, table)

    return make
