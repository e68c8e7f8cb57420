"""Ctrl-C in the middle of a request: whatever it was doing, the client goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.support.transport.interrupts import at_every_step, at_random, in_thread
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
    other, number, waits = store.clone(), 0, []

    def begin() -> None:
        if beside:
            waits.append(in_thread(lambda key=f"{number}": store.get(key)))

    def check() -> None:
        nonlocal number
        number += 1
        assert in_thread(lambda: store.add("n", 1)).result(SOON) == number
        if beside:
            other.set(f"{number - 1}", "come")
            assert waits.pop().result(SOON) == b"come"
        assert store.check(["n"])
        assert not store._connection._expected
        begin()

    begin()
    assert at_every_step(lambda: request_(store), check, _CODE) > 50
    other.set(f"{number}", "come")
    at_random_(store, request_)
    store.close()
    other.close()


def at_random_(store: TCPStore, request_: Callable[[TCPStore], None]) -> None:
    at_random(lambda: request_(store), lambda: store.check(["n"]), times=50)
    assert not store._connection._expected


def test_closing_after_an_interrupt(server: TCPStoreServer) -> None:
    """Its goodbye arrives: the will is withdrawn."""
    other = TCPStore(*server.address, timeout=SOON, secret=b"s")
    stores: list[TCPStore] = []

    def begin() -> None:
        stores.append(other.clone())
        stores[0].set_will("will", "dead")

    def check() -> None:
        stores.pop().close()
        begin()

    begin()
    at_every_step(lambda: stores[0].set("k", "v"), check, _CODE)
    stores.pop().close()
    assert not other.check(["will"])
    other.close()
