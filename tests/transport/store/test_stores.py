"""Behaviour that all stores have in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transport._errors import DistStoreError, QueueEmptyError, StoreTimeoutError
from transport._store import HashStore, Store
from transport._store.prefix_store import PrefixStore

MakeStore = Callable[[], Store]
Later = Callable[[float, Callable[[], object]], threading.Timer]
SOON = 30.0


class TestValues:
    def test_set_and_get(self, make_store: MakeStore) -> None:
        one, other = make_store(), make_store()
        one.set("key", b"value")
        assert other.get("key") == b"value"
        other.set("key", "text, in UTF-8: ä")
        assert one.get("key") == "text, in UTF-8: ä".encode()

    @pytest.mark.parametrize("value", [b"", bytes(range(256)), bytearray(b"x"), memoryview(b"y")])
    def test_values_of_all_kinds(self, store: Store, value: bytes) -> None:
        store.set("key", value)
        assert store.get("key") == bytes(value)

    def test_a_large_value(self, make_store: MakeStore) -> None:
        value = bytes(range(256)) * (5 << 12)
        make_store().set("large", value)
        assert make_store().get("large") == value

    @pytest.mark.parametrize("key", ["", "a/b c", "ключ", "\x00", "x" * 5000])
    def test_keys_of_all_kinds(self, store: Store, key: str) -> None:
        assert not store.check([key])
        store.set(key, key)
        assert store.check([key])
        assert store.get(key) == key.encode()

    def test_wrong_types(self, store: Store) -> None:
        with pytest.raises(TypeError, match="value must be bytes or str, got int"):
            store.set("key", 3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="key must be str, got bytes"):
            store.set(b"key", "value")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="keys must be a list of str, got the str 'key'"):
            store.wait("key")
        with pytest.raises(TypeError, match="keys must be a list of str, got the int 3"):
            store.check(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="values must be a list of bytes or str, got the str"):
            store.multi_set(["key"], "value")
        with pytest.raises(TypeError, match=r"values\[1\] must be bytes or str, got int"):
            store.multi_set(["key", "other"], [b"", 3])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="desired_value must be bytes or str, got NoneType"):
            store.compare_set("key", "", None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"amount must be a whole number, got 1\.5"):
            store.add("key", 1.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="offset must be a whole number, got '0'"):
            store.tail("key", "0")  # type: ignore[arg-type]
        assert store.num_keys() == 0

    def test_add(self, make_store: MakeStore) -> None:
        one, other = make_store(), make_store()
        assert one.add("n", 5) == 5
        assert other.add("n", -7) == -2
        assert one.get("n") == b"-2"
        one.set("n", "40")
        assert other.add("n", 2) == 42
        assert one.add("n", 0) == 42

    def test_add_to_what_is_no_number(self, store: Store) -> None:
        store.set("word", "one")
        with pytest.raises(DistStoreError, match=r"word.*not a number"):
            store.add("word", 1)
        assert store.get("word") == b"one"
        assert store.add("n", 1) == 1

    def test_add_is_atomic(self, make_store: MakeStore) -> None:
        stores = [make_store() for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda store: [store.add("n", 1) for _ in range(25)], stores)
        assert sorted(chain.from_iterable(found)) == list(range(1, 101))

    def test_append(self, make_store: MakeStore) -> None:
        one, other = make_store(), make_store()
        one.append("log", "a")
        other.append("log", b"b")
        one.append("log", "")
        assert other.get("log") == b"ab"

    def test_compare_set(self, make_store: MakeStore) -> None:
        one, other = make_store(), make_store()
        assert one.compare_set("k", "wrong", "new") == b"wrong"
        assert not one.check(["k"])
        assert one.compare_set("k", "", "first") == b"first"
        assert other.compare_set("k", "", "second") == b"first"
        assert other.compare_set("k", "first", "second") == b"second"
        assert one.compare_set("k", "first", "third") == b"second"
        assert one.get("k") == b"second"

    def test_one_of_many_wins_compare_set(self, make_store: MakeStore) -> None:
        stores = [make_store() for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda i: stores[i].compare_set("k", "", str(i)), range(4)))
        assert len(set(found)) == 1

    def test_delete_key(self, make_store: MakeStore) -> None:
        one, other = make_store(), make_store()
        one.set("k", "v")
        assert other.delete_key("k")
        assert not one.delete_key("k")
        assert not one.check(["k"])

    def test_num_keys(self, make_store: MakeStore) -> None:
        one, other = make_store(), make_store()
        assert one.num_keys() == 0
        one.set("a", "1")
        one.set("a", "2")
        one.add("b", 1)
        one.append("c", "x")
        one.queue_push("queue", "x")
        assert other.num_keys() == 3
        one.delete_key("a")
        assert other.num_keys() == 2

    def test_list_keys(self, make_store: MakeStore) -> None:
        one, other = make_store(), make_store()
        assert one.list_keys() == []
        one.multi_set(["b", "a/é", "a"], ["1", "2", ""])
        one.queue_push("queue", "x")
        assert other.list_keys() == ["a", "a/é", "b"]
        other.delete_key("a")
        assert one.list_keys() == ["a/é", "b"]
        assert PrefixStore("a", one).list_keys() == ["é"]

    def test_check(self, store: Store) -> None:
        assert store.check([])
        store.multi_set(["a", "b"], ["", ""])
        assert store.check(["a", "b"])
        assert not store.check(["a", "c"])

    def test_multi_set_and_get(self, make_store: MakeStore) -> None:
        keys = [f"k{i}" for i in range(100)]
        make_store().multi_set(keys, [key.upper() for key in keys])
        assert make_store().multi_get(keys[::-1]) == [k.upper().encode() for k in keys[::-1]]
        assert make_store().multi_get([]) == []

    def test_multi_set_with_other_lengths(self, store: Store) -> None:
        with pytest.raises(ValueError, match="same length, got 2 and 1"):
            store.multi_set(["a", "b"], ["1"])
        assert store.num_keys() == 0


class TestWaits:
    def test_get_waits(self, make_store: MakeStore, later: Later) -> None:
        one, other = make_store(), make_store()
        timer = later(0.05, lambda: other.set("late", "value"))
        assert one.get("late") == b"value"
        timer.join()

    @pytest.mark.parametrize("write", ["set", "add", "append", "compare_set", "multi_set"])
    def test_every_write_wakes(self, make_store: MakeStore, write: str, later: Later) -> None:
        one, other = make_store(), make_store()
        writes = {
            "set": lambda: other.set("late", "1"),
            "add": lambda: other.add("late", 1),
            "append": lambda: other.append("late", "1"),
            "compare_set": lambda: other.compare_set("late", "", "1"),
            "multi_set": lambda: other.multi_set(["late"], ["1"]),
        }
        timer = later(0.05, writes[write])
        one.wait(["late"])
        assert one.get("late") == b"1"
        timer.join()

    def test_wait_for_several(self, make_store: MakeStore, later: Later) -> None:
        one, other = make_store(), make_store()
        timers = [later(0.02 * i, lambda i=i: other.set(f"k{i}", str(i))) for i in (3, 1, 2)]
        assert one.multi_get(["k1", "k2", "k3"]) == [b"1", b"2", b"3"]
        one.wait([])
        for timer in timers:
            timer.join()

    def test_a_deleted_key_is_waited_for_again(self, make_store: MakeStore) -> None:
        one, other = make_store(), make_store()
        with ThreadPoolExecutor(1) as pool:
            values = pool.submit(one.multi_get, ["a", "b"])
            other.set("a", "old")
            time.sleep(0.05)
            other.delete_key("a")
            other.set("b", "2")
            time.sleep(0.05)
            assert not values.done()
            other.set("a", "new")
            assert values.result(SOON) == [b"new", b"2"]

    def test_many_wait_for_one(self, make_store: MakeStore) -> None:
        stores = [make_store() for _ in range(6)]
        with ThreadPoolExecutor(6) as pool:
            values = [pool.submit(store.get, "late") for store in stores]
            time.sleep(0.05)
            make_store().set("late", "v")
            assert [value.result(SOON) for value in values] == [b"v"] * 6

    @pytest.mark.parametrize("method", ["get", "wait", "multi_get", "queue_pop", "tail"])
    def test_timeouts_name_keys_and_store(self, store: Store, method: str) -> None:
        store.set("there", "v")
        calls = {
            "get": lambda: store.get("gone", timeout=0.05),
            "wait": lambda: store.wait(["there", "gone"], 0.05),
            "multi_get": lambda: store.multi_get(["there", "gone"]),
            "queue_pop": lambda: store.queue_pop("gone", timeout=0.05),
            "tail": lambda: store.tail("gone", 0, timeout=0.05),
        }
        store.set_timeout(0.05)
        assert store.timeout.total_seconds() == 0.05
        with pytest.raises(StoreTimeoutError) as caught:
            calls[method]()
        text = str(caught.value)
        assert "gone" in text
        assert "there" not in text
        assert "0.05 s" in text
        assert store.describe().rpartition(", ")[2].rstrip(")") in text
        store.set_timeout(SOON)
        store.set("after", "v")
        assert store.get("after") == b"v"

    def test_a_timeout_of_zero_does_not_wait(self, store: Store) -> None:
        store.set("there", "v")
        assert store.get("there", timeout=0) == b"v"
        with pytest.raises(StoreTimeoutError):
            store.get("gone", timeout=0)

    @pytest.mark.parametrize("timeout", [-1, float("nan")])
    def test_impossible_timeouts(self, store: Store, timeout: float) -> None:
        with pytest.raises(ValueError, match="timeout must be"):
            store.get("k", timeout=timeout)
        with pytest.raises(ValueError, match="timeout must be"):
            store.set_timeout(timeout)

    def test_a_wait_does_not_hold_up_other_threads(self, store: Store) -> None:
        with ThreadPoolExecutor(3) as pool:
            waits = [pool.submit(store.get, key) for key in ("a", "b", "c")]
            time.sleep(0.05)
            for key in ("c", "a", "b"):
                store.set(key, key)
                assert store.get(key) == key.encode()
            assert [wait.result(SOON) for wait in waits] == [b"a", b"b", b"c"]

    def test_short_and_long_waits_side_by_side(self, store: Store) -> None:
        with ThreadPoolExecutor(2) as pool:
            long = pool.submit(store.get, "late")
            time.sleep(0.02)
            short = pool.submit(store.get, "never", 0.05)
            with pytest.raises(StoreTimeoutError, match="never"):
                short.result(SOON)
            assert not long.done()
            store.set("late", "v")
            assert long.result(SOON) == b"v"


class TestQueues:
    def test_first_in_first_out(self, make_store: MakeStore) -> None:
        one, other = make_store(), make_store()
        for value in ("a", "b", "c"):
            one.queue_push("q", value)
        assert other.queue_len("q") == 3
        assert [other.queue_pop("q") for _ in range(3)] == [b"a", b"b", b"c"]
        assert one.queue_len("q") == 0

    def test_empty(self, store: Store) -> None:
        assert store.queue_len("q") == 0
        with pytest.raises(QueueEmptyError, match=r"queue '(a/prefix/)?q' is empty"):
            store.queue_pop("q", block=False)
        store.queue_push("q", "v")
        assert store.queue_pop("q", block=False) == b"v"

    def test_a_queue_is_no_key(self, store: Store) -> None:
        store.queue_push("q", "v")
        assert not store.check(["q"])
        store.set("q", "value")
        assert store.queue_pop("q") == b"v"
        assert store.get("q") == b"value"

    def test_each_value_goes_to_one(self, make_store: MakeStore) -> None:
        poppers = [make_store() for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            taken = [pool.submit(lambda s=s: [s.queue_pop("q") for _ in range(5)]) for s in poppers]
            pusher = make_store()
            for i in range(15):
                pusher.queue_push("q", str(i))
            values = list(chain.from_iterable(wait.result(SOON) for wait in taken))
        assert sorted(map(int, values)) == list(range(15))

    def test_a_wait_that_ended_takes_nothing(self, store: Store) -> None:
        with pytest.raises(StoreTimeoutError):
            store.queue_pop("q", timeout=0.02)
        store.queue_push("q", "v")
        assert store.queue_len("q") == 1


class TestTail:
    def test_a_key_can_be_followed(self, make_store: MakeStore, later: Later) -> None:
        reader, writer = make_store(), make_store()
        pieces = [f"piece {i};" for i in range(20)]
        timer = later(0.02, lambda: [writer.append("log", piece) for piece in pieces])
        text = b""
        while len(text) < len("".join(pieces)):
            text += reader.tail("log", len(text))
        assert text == "".join(pieces).encode()
        timer.join()

    def test_existing_bytes_are_returned_at_once(self, store: Store) -> None:
        store.set("log", "abc")
        assert store.tail("log", 0) == b"abc"
        assert store.tail("log", 2, timeout=0) == b"c"
        with pytest.raises(StoreTimeoutError, match="log"):
            store.tail("log", 3, timeout=0.02)
        with pytest.raises(ValueError, match="offset must be >= 0, got -1"):
            store.tail("log", -1)


class TestLife:
    def test_clones_share_data_and_not_waits(self, store: Store) -> None:
        clone = store.clone()
        with ThreadPoolExecutor(1) as pool:
            wait = pool.submit(store.get, "late")
            clone.set("late", "v")
            assert wait.result(SOON) == b"v"
        clone.close()
        assert store.get("late") == b"v"
        with pytest.raises(DistStoreError, match="closed"):
            clone.get("late")

    def test_close_ends_waits(self, store: Store) -> None:
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(store.get, "never"), pool.submit(store.queue_pop, "never")]
            time.sleep(0.05)
            store.close()
            for wait in waits:
                with pytest.raises(DistStoreError, match="closed"):
                    wait.result(SOON)

    def test_a_closed_store_raises(self, store: Store) -> None:
        store.close()
        store.close()
        for call in (
            lambda: store.set("k", "v"),
            lambda: store.get("k"),
            store.num_keys,
            store.clone,
        ):
            with pytest.raises(DistStoreError, match="closed"):
                call()

    def test_only_a_hash_store_shares_objects(self, make_store: MakeStore) -> None:
        one, other = make_store(), make_store()
        if "HashStore" not in one.describe():
            with pytest.raises(DistStoreError, match="expected a HashStore"):
                one.in_process("hub", object)
            return
        with ThreadPoolExecutor(4) as pool:
            found = list(
                pool.map(lambda i: (one, other)[i % 2].in_process("hub", object), range(8))
            )
        assert len(set(map(id, found))) == 1
        assert one.in_process("other hub", object) is not found[0]

    def test_described_by_kind_and_place(self, store: Store) -> None:
        assert repr(store) == store.describe()
        assert any(
            kind in repr(store)
            for kind in ("HashStore()", "TCPStore(127.", "FileStore('/", "EtcdStore(etcd:")
        )


KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.binary(max_size=3) | st.sampled_from([b"1", b"22"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, VALUES),
        st.tuples(st.just("append"), KEYS, VALUES),
        st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
        st.tuples(st.just("delete_key"), KEYS),
        st.tuples(st.just("add"), KEYS, st.integers(-9, 9)),
        st.tuples(st.just("queue_push"), KEYS, VALUES),
        st.tuples(st.just("queue_pop"), KEYS, st.just(False)),
        st.tuples(st.just("queue_len"), KEYS),
        st.tuples(st.just("check"), st.lists(KEYS, max_size=3)),
        st.tuples(st.just("num_keys")),
    ),
    max_size=30,
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS)
def test_all_stores_are_one_store(make_store: MakeStore, steps: list[tuple[object, ...]]) -> None:
    """Random programs by turns on two users of the store give what a HashStore gives."""
    users, oracle = (make_store(), make_store()), HashStore()
    for key in ("a", "b", "c"):
        users[0].delete_key(key)
        while users[0].queue_len(key):
            users[0].queue_pop(key)
    for number, (method, *arguments) in enumerate(steps):
        found, expected = (
            _outcome(store, str(method), arguments) for store in (users[number % 2], oracle)
        )
        assert found == expected
    for user in users:
        user.close()


def _outcome(store: Store, method: str, arguments: list[object]) -> object:
    try:
        return getattr(store, method)(*arguments)
    except DistStoreError as error:
        return type(error)
