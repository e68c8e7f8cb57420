"""Ranks that have another library's store meet through it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from tests.support.transport.rendezvous_ranks import SOON, check_together
from transport._errors import AuthenticationError, DistNetworkError, DistStoreError
from transport._rendezvous import ForeignStore, foreign_rendezvous
from transport._store import PrefixStore, Store, TCPStore
from transport._tcp.meeting.address import Address


class Foreign:
    """A store as other libraries have them, which knows nothing of ours."""

    def __init__(self, seconds: float = SOON) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.seconds = seconds

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, self.seconds):
                raise RuntimeError(f"foreign store: {key} has not come")
            return self.values[key]

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            value = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(value).encode()
            return value

    def address(self) -> Address:
        """Return what rank 0 has published."""
        return next(Address.decode(v) for k, v in self.values.items() if "meshlib/store" in k)


class ForeignOnANetwork(Foreign):
    """One that says where it is served."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self.host = host
        self.port = port


class Wrapped:
    """A part of another one, as a ``PrefixStore`` is."""

    def __init__(self, store: Foreign) -> None:
        self.underlying_store = store
        self.set, self.get, self.add = store.set, store.get, store.add


@pytest.fixture(autouse=True)
def no_secret(monkeypatch, tmp_path):
    for name in ("MESHLIB_SECRET", "MESHLIB_SECRET_FILE", "MESHLIB_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def meet(foreign: ForeignStore, ranks: int, **others: object) -> list[tuple[Store, bytes | None]]:
    def one(rank: int) -> tuple[Store, bytes | None]:
        return foreign_rendezvous(foreign, rank, ranks, timeout=SOON, **others)  # type: ignore[arg-type]

    with ThreadPoolExecutor(ranks) as pool:
        return [future.result(SOON) for future in [pool.submit(one, i) for i in range(ranks)]]


def close(met: list[tuple[Store, bytes | None]]) -> None:
    for store, _ in reversed(met):
        store.close()


def test_all_get_one_store_at_a_port_that_the_kernel_chose() -> None:
    foreign = Foreign()
    met = meet(foreign, 3)
    check_together([(store, rank, 3) for rank, (store, _) in enumerate(met)], range(3))
    assert met[0][0].serves
    assert not met[1][0].serves
    assert foreign.address().port > 0
    close(met)


def test_who_has_not_read_the_foreign_store_is_kept_out() -> None:
    foreign = Foreign()
    met = meet(foreign, 2)
    address, secret = foreign.address(), met[1][1]
    assert secret
    assert len(secret) == 32
    for wrong in (None, b"guessed"):
        with pytest.raises((AuthenticationError, DistNetworkError, DistStoreError)):
            TCPStore(address.host, address.port, timeout=2, secret=wrong)
    TCPStore(address.host, address.port, timeout=SOON, secret=secret).close()
    close(met)


def test_a_secret_of_the_environment_is_not_in_the_foreign_store(monkeypatch) -> None:
    monkeypatch.setenv("MESHLIB_SECRET", "ab" * 16)
    foreign = Foreign()
    met = meet(foreign, 2)
    assert [secret for _, secret in met] == [bytes.fromhex("ab" * 16)] * 2
    assert not any(b"abababab" in value for value in foreign.values.values())
    close(met)


def test_each_job_in_one_foreign_store_has_its_own() -> None:
    foreign = Foreign()
    first, second = meet(foreign, 2), meet(foreign, 2)
    first[0][0].set("key", "first")
    second[1][0].set("key", "second")
    assert first[1][0].get("key") == b"first"
    named = meet(foreign, 2, group_name="other")
    assert isinstance(named[0][0], PrefixStore)
    assert not named[0][0].check(["key"])
    for met in (first, second, named):
        close(met)


def test_a_foreign_store_on_this_machine_gives_the_address_of_rank_0() -> None:
    foreign = ForeignOnANetwork("127.0.0.1", 9)
    met = meet(Wrapped(foreign), 2)
    assert foreign.address().host == "127.0.0.1"
    close(met)


def test_the_address_that_is_given_is_published(monkeypatch) -> None:
    monkeypatch.setenv("MESHLIB_HOST", "127.0.0.2")
    foreign = Foreign()
    met = meet(foreign, 2)
    assert foreign.address().host == "127.0.0.2"
    close(met)


def test_the_error_names_rank_0_if_it_is_missing() -> None:
    message = "rank 1 waited in Foreign for the address of rank 0's .*meshlib/store/1 has not come"
    with pytest.raises(DistStoreError, match=message):
        foreign_rendezvous(Foreign(seconds=0.05), 1, 2)


def test_init_process_group_takes_it() -> None:
    foreign = Foreign()

    def program() -> float:
        rank = dist.get_rank()
        dist.init_process_group("tcp", store=foreign, rank=rank, world_size=2)
        try:
            return float(dist.all_reduce(np.array([rank + 1.0]))[0])
        finally:
            dist.destroy_process_group()

    assert run_ranks(program, 2) == [3.0, 3.0]
