"""Requests without a round trip: writing without waiting, and waits that can be broken off."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from transport._errors import DistStoreError, RankFailedError, StoreTimeoutError
from transport._store import HashStore, PrefixStore, Store, TCPStore
from transport._store.etcd.store import EtcdStore
from transport._store.tcp.client import StoreConnection

SOON = 30.0


@pytest.fixture(params=["tcp", "hash", "etcd"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    made: Store = HashStore()
    if request.param == "tcp":
        made = TCPStore("127.0.0.1", 0, is_master=True, timeout=10 * SOON, secret=None)
    elif request.param == "etcd":
        made = EtcdStore(request.getfixturevalue("etcd").url(), 10 * SOON, tls=None)
    with made:
        yield made


def test_what_is_posted_is_there_for_the_next_call(store: Store) -> None:
    part = PrefixStore("part", store)
    for turn in range(100):
        part.post("key", f"{turn}")
        assert part.get("key") == f"{turn}".encode()
    with store.clone() as other:
        assert other.get("part/key") == b"99"


def test_posting_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with TCPStore("127.0.0.1", 0, is_master=True, secret=None) as store:
        with monkeypatch.context() as patched:
            patched.setattr(StoreConnection, "_receive", None)
            store.post("key", "value")
        assert store.get("key") == b"value"


def test_hanging_up_ends_the_waits_aside_and_no_others(store: Store) -> None:
    aside = PrefixStore("part", store).aside()
    with ThreadPoolExecutor(3) as pool:
        broken = pool.submit(aside.multi_get, ["a", "b"])
        goes_on = pool.submit(store.get, "part/c")
        with store.clone() as other:  # a wait may begin before it is broken off, or behind that
            aside.hang_up()
            with pytest.raises(DistStoreError):
                broken.result(SOON)
            with pytest.raises(DistStoreError):
                aside.get("a")
            aside.close()
            assert not goes_on.done()
            other.set("part/c", "come")
            assert goes_on.result(SOON) == b"come"
        store.set("still", "open")
        assert store.get("still") == b"open"


def test_ending_a_stores_waits_ends_none_aside_of_it(store: Store) -> None:
    aside = store.aside()
    other = store.with_grace(SOON)
    with ThreadPoolExecutor(2) as pool:
        goes_on = pool.submit(aside.get, "key")
        store.end_waits(RankFailedError("rank 1 is gone", 1))
        for same in (store, other):
            with pytest.raises(RankFailedError, match="rank 1 is gone"):
                same.get("never")
        later = pool.submit(aside.get, "key")
        store.set("key", "come")
        assert goes_on.result(SOON) == later.result(SOON) == b"come"
    aside.end_waits(RankFailedError("rank 2 is gone", 2))
    with pytest.raises(RankFailedError, match="rank 2 is gone"):
        aside.get("never")
    store.end_waits(None)
    with pytest.raises(StoreTimeoutError):
        store.get("never", timeout=0.01)
    aside.close()


def test_a_wait_that_ends_by_itself_leaves_nothing() -> None:
    with TCPStore("127.0.0.1", 0, is_master=True, secret=None) as store:
        aside = store.aside()
        store.set("key", "value")
        assert aside.get("key") == b"value"
        assert aside._breaker is not None
        assert not aside._breaker.numbers
        assert not store._connection._expected
        aside.close()
        assert store.get("key") == b"value"
