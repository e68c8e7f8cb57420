"""Waits in the store of a group, and breaking them off."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from transport._communicators.runtime import Membership, Runtime
from transport._communicators.store_waits import PeerKeys
from transport._errors import CommunicatorAbortedError
from transport._net.auth import authenticate
from transport._net.sockets import listen
from transport._store import Store, TCPStore
from transport._waiting.deadline import Deadline

SOON = 30.0
WAITS = 3


@pytest.fixture
def stopped_server() -> Iterator[tuple[str, int]]:
    """The address of a server that takes a connection and then does nothing, like a stopped one."""
    taken: list[socket.socket] = []
    with listen() as listener:

        def serve() -> None:
            taken.append(listener.accept()[0])  # of the one client, over which all waits go
            authenticate(taken[-1], None, Deadline.after(SOON), initiator=False)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        thread.join(SOON)
    for sock in taken:
        sock.close()


def test_cancel_talks_to_nobody(
    stopped_server: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not wait for a server that says nothing any more."""
    monkeypatch.setattr("transport._store.tcp.client._GOODBYE_SECONDS", 2 * SOON)
    store = TCPStore(*stopped_server, timeout=10 * SOON, secret=None)
    waits = PeerKeys(Membership("group", 0, (0, 1), store, Runtime()))
    with ThreadPoolExecutor(WAITS + 1) as pool:
        requests: list[Callable[[Store], object]] = [
            lambda client: client.get("never"),
            lambda client: client.check(["never"]),
            lambda client: client.multi_get(["never", "ever"]),
        ]
        ended = [pool.submit(waits.wait, request) for request in requests]
        while len(waits._waiting) < WAITS:
            pass
        pool.submit(waits.cancel, "the group has failed").result(SOON)
        for wait in ended:
            with pytest.raises(CommunicatorAbortedError, match="the group has failed"):
                wait.result(SOON)
    store.close()
