"""Links that count what is sent over them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transport.call import Call
from transport.choosing.choice import Thresholds
from transport.communicators.runtime import Membership
from transport.inproc import InprocCommunicator, InprocLink
from transport.link import Link, OnPiece


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

    def send(self, call: Call, data: memoryview) -> None:
        self._count.add(data.nbytes)
        self.inner.send(call, data)

    def recv_into(self, call: Call, into: memoryview) -> None:
        self.inner.recv_into(call, into)

    def exchange(
        self,
        call: Call,
        data: memoryview,
        source: Link,
        into: memoryview,
        on_piece: OnPiece | None = None,
    ) -> None:
        assert isinstance(source, CountingLink)
        self._count.add(data.nbytes)
        self.inner.exchange(call, data, source.inner, into, on_piece)


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
