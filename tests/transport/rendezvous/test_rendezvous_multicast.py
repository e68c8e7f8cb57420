"""Processes that know only a multicast group find each other."""

from __future__ import annotations

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.transport.growing import with_growing_deadlines
from tests.support.transport.rendezvous_ranks import (
    SOON,
    check_together,
    meet,
    meeting,
    run_processes,
)
from transport._errors import (
    AuthenticationError,
    DistNetworkError,
    DistStoreError,
    StoreTimeoutError,
)
from transport._rendezvous.announcements import Announcement, MulticastSocket, new_identity
from transport._rendezvous.multicast import _StoreSearch
from transport._rendezvous.plain import is_multicast

GROUPS = ["224.66.55.44", "ff15:1e18:5d4c:4cf0:d02d:b659:53ba:b0a7"]


def url_of(group: str, port: int) -> str:
    host = f"[{group}]" if ":" in group else group
    return f"tcp://{host}:{port}"


@pytest.fixture(params=GROUPS, ids=["IPv4", "IPv6"])
def url(request: pytest.FixtureRequest, free_port: int) -> str:
    """Return the URL of a group; skip where this machine does not carry its datagrams."""
    try:
        one = MulticastSocket(request.param, free_port, "probe", None, None)
        other = MulticastSocket(request.param, free_port, "probe", None, None)
    except DistNetworkError as error:
        pytest.skip(str(error))
    received: list[Announcement] = []
    one.send(Announcement("probe", new_identity()))
    other.receive(2.0, lambda announcement: received.append(announcement) is None)
    one.close()
    other.close()
    if not received:
        pytest.skip(f"no datagram to {request.param} comes back to this machine")
    return url_of(request.param, free_port)


def test_ranks_are_assigned(url: str) -> None:
    with meeting(url, [-1] * 5) as met:
        check_together(met, range(5))


def test_ranks_are_given(url: str) -> None:
    with meeting(url, [2, -1, 0, -1]) as met:
        assert met[0][1] == 2
        assert met[2][1] == 0
        check_together(met, range(4))


def test_groups_are_apart_in_one_multicast_group(url: str) -> None:
    with meeting(url, [-1] * 2, group_name="one") as one, ThreadPoolExecutor(1) as pool:
        early = pool.submit(meet, url, -1, 2, group_name="two")
        check_together(one, range(2))
        two = meet(url, -1, 2, group_name="two")
        check_together([two, early.result(SOON)], range(2))
        for store, _, _ in (two, early.result()):
            store.close()


def test_a_late_process(url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(meet, url, -1, 3)]
        time.sleep(0.5)
        met.append(pool.submit(meet, url, -1, 3))
        time.sleep(0.2)
        last = meet(url, -1, 3)
        check_together([last, *(future.result(SOON) for future in met)], range(3))
        for store, _, _ in (last, *(future.result() for future in met)):
            store.close()


def test_a_missing_process(url: str) -> None:
    def attempt(seconds: float) -> str | None:
        with suppress(AuthenticationError):  # its own store has not answered in time
            with pytest.raises(StoreTimeoutError) as late:
                meet(url, -1, 2, timeout=seconds)
            return str(late.value)
        return None

    text = with_growing_deadlines(attempt)
    assert re.search(r"waited \d+(\.\d)? s for 2 processes; 1 arrived", text)


def test_ranks_that_do_not_fit(url: str) -> None:
    with (
        pytest.raises(DistStoreError, match=r"several processes have the same rank: \[1\]"),
        meeting(url, [1, 1]),
    ):
        pass


def test_world_sizes_that_do_not_fit(url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(meet, url, -1, size) for size in (2, 3)]
        for future in found:
            with pytest.raises(DistStoreError, match=r"world_size differs: (2 and 3|3 and 2)"):
                future.result(SOON)


def test_another_secret_is_another_job(url: str) -> None:
    def attempt(seconds: float) -> list[str] | None:
        secrets = (None, b"s")
        with ThreadPoolExecutor(2) as pool, suppress(AuthenticationError):
            met = [pool.submit(meet, url, -1, 2, secret=s, timeout=seconds) for s in secrets]
            texts = list[str]()
            for one in met:
                with pytest.raises(StoreTimeoutError) as late:
                    one.result(SOON + seconds)
                texts.append(str(late.value))
            return texts
        return None

    assert all("1 arrived" in text for text in with_growing_deadlines(attempt))


@pytest.mark.processes
def test_processes(url: str) -> None:
    assert run_processes([(url, -1, 3)] * 3) == ["0 3", "1 3", "2 3"]


class TestAnnouncements:
    def test_only_with_the_jobs_secret(self) -> None:
        announcement = Announcement("job", new_identity(), "host", 80)
        data = announcement.pack(b"s")
        assert Announcement.unpack(data, b"s") == announcement
        assert Announcement.unpack(data, b"other") is None
        assert Announcement.unpack(data, None) is None
        assert Announcement.unpack(data[:-1] + b"]", b"s") is None

    @pytest.mark.parametrize(
        "change",
        [{"port": "80"}, {"port": -1}, {"port": 70000}, {"host": 3}, {"group": None}],
    )
    def test_wrong_fields(self, change: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
        fields = {"group": "g", "identity": "i", "host": "h", "port": 1, **change}
        monkeypatch.setattr("transport._rendezvous.announcements.asdict", lambda _: fields)
        assert Announcement.unpack(Announcement("g", "i").pack(b"s"), b"s") is None

    @given(body=st.binary(max_size=100) | st.recursive(st.none(), st.lists).map(json.dumps))
    def test_any_body(self, body: bytes | str) -> None:
        from transport._rendezvous.announcements import _MAGIC, _proof

        data = body.encode() if isinstance(body, str) else body
        assert Announcement.unpack(data, b"s") is None
        assert Announcement.unpack(_MAGIC + _proof(b"s", data) + data, b"s") is None

    def test_too_long_a_datagram(self) -> None:
        assert Announcement.unpack(Announcement("x" * 2000, "i").pack(b"s"), b"s") is None


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((group, True) for group in GROUPS),
        ("ff02::1%eth0", True),
        ("127.0.0.1", False),
        ("::1", False),
        ("host", False),
    ],
)
def test_which_addresses_are_groups(host: str, expected: bool) -> None:
    assert is_multicast(host) is expected


def test_no_way_to_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(socket.socket, "setsockopt", fail)
    with pytest.raises(DistNetworkError, match=r"no route to the multicast group 224.1.1.1:80"):
        MulticastSocket("224.1.1.1", 80, "g", None, None)


def test_of_two_who_serve_one_gives_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where datagrams were lost; also who had joined the other comes over."""
    real = _StoreSearch._find_host
    serving: list[_StoreSearch] = []

    def find_host(search: _StoreSearch) -> Announcement | None:
        if len(serving) < 2 and search not in serving:
            serving.append(search)
            return None
        return real(search)

    monkeypatch.setattr(_StoreSearch, "_find_host", find_host)
    with meeting(url, [-1] * 4) as met:
        check_together(met, range(4))
    assert len(serving) == 2
