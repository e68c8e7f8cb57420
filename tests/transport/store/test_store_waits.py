"""Waits in the store of a group, and breaking them off."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from transport.communicators.store_waits import StoreWaits
from transport.deadline import Deadline
from transport.errors import CommunicatorAbortedError
from transport.net.auth import authenticate
from transport.net.sockets import listen
from transport.store import TCPStore

SOON = 30.0
WAITS = 3


@pytest.fixture
def stopped_server() -> Iterator[tuple[str, int]]:
    """The address of a server that takes connections and then does nothing, like a stopped one."""
    taken: list[socket.socket] = []
    with listen() as listener:

        def serve() -> None:
            for _ in range(WAITS + 1):
                taken.append(listener.accept()[0])
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
    monkeypatch.setattr("transport.store.tcp.client._GOODBYE_SECONDS", 2 * SOON)
    store = TCPStore(*stopped_server, timeout=10 * SOON, secret=None)
    waits = StoreWaits(store)
    with ThreadPoolExecutor(WAITS + 1) as pool:
        ended = [pool.submit(waits.wait, lambda client: client.get("never")) for _ in range(WAITS)]
        while len(waits._waiting) < WAITS:
            pass
        pool.submit(waits.cancel, "the group has failed").result(SOON)
        for wait in ended:
            with pytest.raises(CommunicatorAbortedError, match="the group has failed"):
                wait.result(SOON)
    store.close()
