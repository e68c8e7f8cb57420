"""News that a member has left may overtake its messages: they are received all the same."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._communicators.runtime import Membership, Runtime
from transport._errors import PeerLostError
from transport._mpi import communicator
from transport._mpi.communicator import MpiCommunicator
from transport._store.hash_store import HashStore
from transport._waiting.deadline import Deadline

SOON = 30.0


class FakeMpi:
    """Two processes in this one; messages come out once they are ``due``."""

    ANY_SOURCE, BYTE = -1, None
    Status = SimpleNamespace

    def __init__(self) -> None:
        self.due = threading.Event()
        self._sent: dict[tuple[int, int], deque[bytes]] = {}

    def process(self, rank: int) -> Any:
        def send(buffer: Any, dst: int, tag: int) -> Any:
            self._sent.setdefault((dst, tag), deque()).append(bytes(buffer[0]))

        def probe(source: int, tag: int, status: Any) -> Any:
            queue = self._sent.get((rank, tag))
            if not queue or not self.due.is_set():
                return None
            data = queue.popleft()
            status.Get_source = lambda: 1 - rank

            def receive(into: Any) -> None:
                into[0][: len(data)] = data

            return SimpleNamespace(Recv=receive)

        return SimpleNamespace(
            mpi=self,
            comm=SimpleNamespace(Isend=send, Improbe=probe),
            agree_on_tag=lambda propose: 2 * int(propose("0")),
        )


def call(kind: Kind) -> Call:
    header = CallHeader(0, 1, NO_ROOT, kind, dtype_code(np.dtype("f8")), 0)
    return Call(header, Deadline.after(SOON))


@pytest.mark.parametrize("notice", ["before the receive", "in the receive"])
def test_messages_that_a_notice_overtook(monkeypatch: pytest.MonkeyPatch, notice: str) -> None:
    mpi, store = FakeMpi(), HashStore()
    monkeypatch.setattr(communicator, "wait", lambda *_: True)
    members: list[MpiCommunicator] = []
    for rank in range(2):
        monkeypatch.setattr(communicator, "joined", lambda rank=rank: mpi.process(rank))
        members.append(MpiCommunicator(Membership("g", rank, (0, 1), store, Runtime())))
    receiver, sender = members
    for value in (3.0, 4.0):
        sender.send(call(Kind.SEND), np.full(1, value), 0, 0)
    sender.close()

    def overtake() -> None:
        if notice == "in the receive":
            while not receiver.mailbox._receives:
                pass
        receiver.lose(1, "rank 1 has left the job")
        mpi.due.set()

    other = threading.Thread(target=overtake)
    other.start()
    if notice == "before the receive":
        other.join()
    got = np.zeros(1)
    for value in (3.0, 4.0):
        assert receiver.recv(call(Kind.RECV), got, 1, 0) == 1
        assert got[0] == value
    other.join()
    with pytest.raises(PeerLostError, match="has left the job"):
        receiver.recv(call(Kind.RECV), got, 1, 0)
    receiver.close()


def test_who_has_sent_nothing_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "joined", lambda: FakeMpi().process(0))
    receiver = MpiCommunicator(Membership("g", 0, (0, 1), HashStore(), Runtime()))
    receiver.lose(1, "rank 1 has left the job")
    with pytest.raises(PeerLostError, match="has left the job"):
        receiver.recv(call(Kind.RECV), np.zeros(1), 1, 0)
    receiver.close()
