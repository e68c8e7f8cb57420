"""Every kind of store, as a factory of users of one store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from transport._store import FileStore, HashStore, PrefixStore, Store, TCPStore, TCPStoreServer
from transport._store.etcd.store import EtcdStore

MakeStore = Callable[[], Store]
TIMEOUT = 60.0
_KINDS = ("hash", "tcp", "file", "etcd")


@pytest.fixture(params=[*_KINDS, *(f"prefix over {kind}" for kind in _KINDS)])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    """Return a function whose every call gives another user of the same store."""
    kind = request.param.removeprefix("prefix over ")
    made: list[Store] = []
    server = TCPStoreServer(secret=b"s") if kind == "tcp" else None
    root = HashStore(TIMEOUT)
    url = request.getfixturevalue("etcd").url() if kind == "etcd" else ""

    def make() -> Store:
        if server is not None:
            store: Store = TCPStore(*server.address, timeout=TIMEOUT, secret=b"s")
        elif kind == "etcd":
            store = EtcdStore(url, TIMEOUT, tls=None)
        elif kind == "file":
            store = FileStore(tmp_path / "store", timeout=TIMEOUT)
        else:
            store = root.clone()
        made.append(store)
        return PrefixStore("a/prefix", store) if request.param != kind else store

    yield make
    for store in made:
        store.close()
    if server is not None:
        server.close()


@pytest.fixture
def later(make_store: MakeStore) -> Iterator[Callable[[float, Callable[[], object]], object]]:
    """Return what has an action run some seconds later.

    No store is closed under one that was to release a wait.
    """
    timers: list[threading.Timer] = []

    def start(seconds: float, action: Callable[[], object]) -> threading.Timer:
        timers.append(threading.Timer(seconds, action))
        timers[-1].start()
        return timers[-1]

    yield start
    for timer in timers:
        timer.join(TIMEOUT)


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    return make_store()


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    server = TCPStoreServer(secret=b"s")
    yield server
    server.close()


@pytest.fixture
def connect(server: TCPStoreServer) -> Iterator[Callable[[], TCPStore]]:
    """Return a function whose every call gives another client of ``server``."""
    made: list[TCPStore] = []

    def make() -> TCPStore:
        made.append(TCPStore(*server.address, timeout=TIMEOUT, secret=b"s"))
        return made[-1]

    yield make
    for store in made:
        store.close()
