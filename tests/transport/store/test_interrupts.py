"""Ctrl-C in the middle of a request: whatever it was doing, the client goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from interrupts import Interrupter, in_thread

from transport._errors import StoreTimeoutError
from transport._store import TCPStore, TCPStoreServer
from transport._store.tcp import client

SOON = 30.0
_CODE = {client.__file__, threading.__file__}


def _wait_in_vain(store: TCPStore) -> None:
    with suppress(StoreTimeoutError):
        store.get("never", timeout=0)


REQUESTS: list[Callable[[TCPStore], None]] = [
    lambda store: store.set("k", "v"),
    _wait_in_vain,
]


@pytest.mark.parametrize("request_", REQUESTS, ids=["set", "wait"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another thread"])
def test_at_every_step(
    server: TCPStoreServer, request_: Callable[[TCPStore], None], beside: bool
) -> None:
    """Another thread's wait ends well, and this thread's and others' later requests do."""
    store = TCPStore(*server.address, timeout=SOON, secret=b"s")
    other = store.clone()
    moment, interrupter = 0, None
    while interrupter is None or interrupter.left <= 0:
        moment += 1
        waits = in_thread(lambda key=f"{moment}": store.get(key)) if beside else None
        with suppress(KeyboardInterrupt), Interrupter(moment, _CODE) as interrupter:
            request_(store)
        assert in_thread(lambda: store.add("n", 1)).result(SOON) == moment
        if waits is not None:
            other.set(f"{moment}", "come")
            assert waits.result(SOON) == b"come"
        assert in_thread(lambda: store.check(["n"])).result(SOON)
        assert store.check(["n"])
    assert moment > 50
    assert not store._connection._expected
    store.close()
    other.close()


def test_closing_after_an_interrupt(server: TCPStoreServer) -> None:
    """Its goodbye arrives: the will is withdrawn."""
    other = TCPStore(*server.address, timeout=SOON, secret=b"s")
    moment, interrupter = 0, None
    while interrupter is None or interrupter.left <= 0:
        moment += 3
        store = other.clone()
        store.set_will("will", "dead")
        with suppress(KeyboardInterrupt), Interrupter(moment, _CODE) as interrupter:
            store.set("k", "v")
        in_thread(store.close).result(SOON)
    assert not other.check(["will"])
    other.close()
