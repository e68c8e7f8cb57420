"""Waits that end before what they wait for comes: somebody is known to be gone, or hangs up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from transport._errors import DistStoreError, RankFailedError, StoreTimeoutError
from transport._store import Store

MakeStore = Callable[[], Store]
Later = Callable[[float, Callable[[], object]], threading.Timer]
SOON = 30.0


class TestEndedWaits:
    def test_a_wait_under_way_ends(self, make_store: MakeStore, later: Later) -> None:
        store, other = make_store(), make_store()
        with ThreadPoolExecutor(4) as pool:
            waits = [
                pool.submit(store.get, "never"),
                pool.submit(store.wait, ["one", "never"]),
                pool.submit(store.queue_pop, "queue"),
                pool.submit(store.tail, "log", 0),
            ]
            while sum(not wait.running() for wait in waits):
                time.sleep(0.001)
            later(0.02, lambda: store.end_waits(RankFailedError("rank 1 is gone", 1)))
            for wait in waits:
                with pytest.raises(RankFailedError, match="rank 1 is gone") as caught:
                    wait.result(SOON)
                assert caught.value.rank == 1
        # What a wait that was ended would have taken is still there for others.
        other.queue_push("queue", b"value")
        assert other.queue_pop("queue", timeout=SOON) == b"value"

    def test_later_waits_find_what_is_there(self, make_store: MakeStore) -> None:
        store, other = make_store(), make_store()
        store.end_waits(RankFailedError("rank 1 is gone", 1))
        with pytest.raises(RankFailedError):
            store.get("key")
        other.set("key", b"value")
        assert store.get("key") == b"value"
        assert store.multi_get(["key"]) == [b"value"]
        assert store.add("n", 1) == 1
        store.end_waits(None)
        with pytest.raises(StoreTimeoutError):
            store.wait(["never"], timeout=0.02)

    def test_each_takes_back_only_its_own(self, make_store: MakeStore) -> None:
        store = make_store()
        store.end_waits(RankFailedError("rank 1 is gone", 1), by="rank 0")
        store.end_waits(None, by="rank 1")
        with pytest.raises(RankFailedError):
            store.get("key")
        store.end_waits(RankFailedError("rank 1 is gone", 1), by="rank 2")
        store.end_waits(None, by="rank 0")
        with pytest.raises(RankFailedError):
            store.get("key")
        store.end_waits(None, by="rank 2")
        with pytest.raises(StoreTimeoutError):
            store.wait(["never"], timeout=0.02)

    def test_a_wait_that_was_ended_raises_though_that_was_taken_back(
        self, make_store: MakeStore
    ) -> None:
        store = make_store()
        with ThreadPoolExecutor(1) as pool:
            wait = pool.submit(store.get, "never")
            # Again and again: a FileStore looks now and then only, and may miss it.
            while not wait.done():
                store.end_waits(RankFailedError("rank 1 is gone", 1))
                time.sleep(0.01)
                store.end_waits(None)
            with pytest.raises(RankFailedError):
                wait.result()

    def test_other_objects_wait_on(self, make_store: MakeStore, later: Later) -> None:
        store, other = make_store(), make_store()
        store.end_waits(RankFailedError("rank 1 is gone", 1))
        later(0.02, lambda: store.set("key", b"value"))
        assert other.get("key", timeout=SOON) == b"value"


class TestHangingUp:
    def test_ends_waits_and_later_calls(self, make_store: MakeStore) -> None:
        store, other = make_store(), make_store()
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(store.get, "never") for _ in range(2)]
            time.sleep(0.05)
            store.hang_up()
            for wait in waits:
                with pytest.raises(DistStoreError):
                    wait.result(SOON)
        with pytest.raises(DistStoreError):
            store.get("never")
        other.set("k", "v")
        assert other.get("k") == b"v"
