"""A rank that is only cut off is not said to be gone: nobody knows what has become of it."""

from __future__ import annotations

import errno
import os
import socket
import threading
from typing import Any

import numpy as np
import pytest

import meshlib as dist
from meshlib._calls.failures.messages import lost_message
from meshlib._calls.members import Members
from meshlib._diagnosis.shared_thread import SharedThread
from meshlib._job.current import current_world
from meshlib._recording.recorder import COLLECTIVE, Record
from meshlib.testing import run_ranks
from transport._calls.call import Call
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._errors import DistError, DistStoreError, PeerLostError, StoreSilentError
from transport._store import HashStore, TCPStore, TCPStoreServer
from transport._tcp.link import TcpLink
from transport._waiting.deadline import Deadline

LONG = 60.0
CUT = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
RESET = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


class Ended(socket.socket):
    """A connection that the kernel has given up, with the given error."""

    error: OSError

    def recv(self, *_: Any) -> bytes:
        raise self.error


@pytest.mark.parametrize(("error", "unreachable"), [(CUT, True), (RESET, False)])
def test_a_client_knows_whether_its_server_has_ended(error: OSError, unreachable: bool) -> None:
    server = TCPStoreServer(secret=b"s")
    store = TCPStore(*server.address, timeout=LONG, secret=b"s")
    connection = store._connection
    ended = Ended(fileno=connection._sock.detach())
    ended.error = error
    connection._sock = ended
    for _ in range(2):  # the second time the connection is known to have ended
        with pytest.raises(DistStoreError) as caught:
            store.get("never")
        assert isinstance(caught.value, StoreSilentError) is unreachable
    store.close()
    server.close()


class Worker(SharedThread[str]):
    """Ends as told; says by what it lost its store."""

    name = "worker"
    end: DistError

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[DistError | None] = []
        self.may_end, self.store_lost = threading.Event(), threading.Event()

    def work(self, store: Any, ending: threading.Event) -> None:
        assert self.may_end.wait(LONG)
        raise self.end

    def on_store_lost(self, error: DistError | None) -> None:
        self.errors.append(error)
        self.store_lost.set()


def test_who_loses_the_store_is_told_by_what() -> None:
    with HashStore() as store:
        worker = Worker.of(store)
        worker.end = StoreSilentError("no answer")
        worker.enter("a rank", store)
        worker.may_end.set()
        assert worker.store_lost.wait(LONG)
        assert worker.errors == [worker.end]
        worker.leave("a rank")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (StoreSilentError("tcp://a:1: timed out"), "cannot be reached.* tcp://a:1: timed out"),
        (DistStoreError("the server hung up"), "is gone, and with it the store that it served"),
        (None, "is gone, and with it the store that it served"),
    ],
)
def test_the_rank_that_serves_the_store(error: DistError | None, words: str) -> None:
    both = threading.Barrier(2)

    def program() -> None:
        dist.barrier()
        both.wait(LONG)  # rank 0 is through
        if dist.get_rank() == 1:
            world = current_world()
            world.listener.server = 0
            world.listener.on_store_lost(error)
            with pytest.raises(dist.RankFailedError, match=f"^rank 0 {words}") as caught:
                dist.all_reduce(np.ones(1))
            assert caught.value.rank == 0
        both.wait(LONG)  # who has left in good order is not lost

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (CUT, "rank 1 cannot be reached"),
        (RESET, "rank 1 is gone"),
        ("it hung up", "rank 1 is gone"),
    ],
)
def test_a_member_whose_connection_has_ended(error: object, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        link = TcpLink((ours,), 1, "rank 1")
        lost = link.lost(error)
        link.close()
    assert isinstance(lost, PeerLostError)
    again = PeerLostError.of(lost, 1)  # as those are told who wait for its messages
    header = CallHeader(1, 4, NO_ROOT, Kind.ALL_REDUCE, 11, 1)
    packed = bytes(Call(header, Deadline.after(LONG)).packed)
    code = test_who_loses_the_store_is_told_by_what.__code__
    record = Record(packed, True, "g", 32, COLLECTIVE, 6.0, None, 0, code, 0)
    group = Members("g", (0, 1), 0, {"cpu": "tcp"}, LONG, "")
    for each in (lost, again):
        assert lost_message(group, record, each, {}, ()).startswith(words)
