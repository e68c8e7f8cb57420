"""Sites that nobody has named: when they are found, and that all members find the same."""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from counting import Count
from rank_threads import LONG, TINY, Member, Transport, run_group

from transport.call import Call, Kind
from transport.choosing.choice import Thresholds
from transport.communicators.runtime import Membership
from transport.errors import CommunicatorAbortedError
from transport.hierarchical import HierarchicalCommunicator
from transport.hierarchical.hosts import Placement
from transport.hierarchical.learning import find_sites, hosts_to_measure
from transport.inproc import InprocCommunicator
from transport.net import round_trip
from transport.net.round_trip import ATTEMPTS, round_trip_of, time_connections
from transport.net.sockets import listen
from transport.operands.reduce_op import ReduceOp
from transport.place import Place, this_place
from transport.store import HashStore, TCPStore

MS = 1e-3


def trips(hosts: str, *, near: float = 0.2 * MS, far: float = 10 * MS) -> tuple[list[float], Any]:
    """What hosts at the sites ``hosts`` measure, the store being at that of the first one."""

    def length(a: int, b: int) -> float:
        return near if hosts[a] == hosts[b] else far

    to_store = [length(0, host) for host in range(len(hosts))]
    between = {pair: length(*pair) for pair in combinations(hosts_to_measure(to_store), 2)}
    return to_store, between


@pytest.mark.parametrize("hosts", ["aabb", "abab", "abbb", "aabbcc", "abcabc", "aabc", "ab"])
def test_hosts_much_nearer_to_each_other_are_a_site(hosts: str) -> None:
    found = find_sites(*trips(hosts))
    assert found is not None
    numbers = list(dict.fromkeys(hosts))
    assert found[0] == tuple(numbers.index(host) for host in hosts)
    assert found[1:] == (0.1 * MS if hosts == "ab" else 0.2 * MS, 10 * MS)


@pytest.mark.parametrize(
    ("hosts", "near", "far"),
    [
        ("aaaa", 0.2, 10),  # one site
        ("aabb", 0.2, 1.9),  # not far
        ("aabb", 1.9, 9),  # not clear
    ],
)
def test_without_a_clear_gap_there_is_one_site(hosts: str, near: float, far: float) -> None:
    assert find_sites(*trips(hosts, near=near * MS, far=far * MS)) is None


def test_noise_changes_nothing() -> None:
    rng = random.Random(1)
    for _ in range(100):
        to_store, between = trips("aabbbc")
        noisy = [seconds * rng.uniform(1, 2) for seconds in to_store]
        shaken = {pair: seconds * rng.uniform(1, 2) for pair, seconds in between.items()}
        found = find_sites(noisy, shaken)
        assert found is not None
        assert found[0] == (0, 0, 1, 1, 1, 2)


def test_hosts_that_are_not_all_near_to_each_other_are_no_site() -> None:
    """1 and 2 are near, 2 and 3 are near, 1 and 3 are not."""
    between = {(1, 2): 0.2 * MS, (1, 3): 10 * MS, (2, 3): 0.2 * MS}
    to_first = {(0, host): 10 * MS for host in (1, 2, 3)}
    assert find_sites([0.1 * MS, 10 * MS, 10 * MS, 10 * MS], between | to_first) is None


def test_a_distance_that_nobody_knows_is_none_to_rely_on() -> None:
    to_store, between = trips("aabb")
    assert find_sites(to_store, {**between, (2, 3): 0.0}) is None
    assert find_sites(to_store, {}) is None


def test_sites_inside_of_sites_are_one() -> None:
    """Rooms at 3 ms of each other, and a place 100 ms from both."""
    found = find_sites([0.1 * MS, 3 * MS, 100 * MS, 100 * MS], {
        (0, 1): 3 * MS, (0, 2): 100 * MS, (0, 3): 100 * MS,
        (1, 2): 100 * MS, (1, 3): 100 * MS, (2, 3): 0.2 * MS,
    })  # fmt: skip
    assert found is not None
    assert found[0] == (0, 0, 1, 1)


@pytest.mark.parametrize("busy", [[2], [0], [1, 3], [1, 2, 3], [0, 1, 2, 3]])
def test_hosts_that_only_seem_far_from_the_store_are_no_site(busy: list[int]) -> None:
    """Their machine, or the store's, was busy, or the store has another network."""
    to_store = [30 * MS if host in busy else 0.2 * MS for host in range(4)]
    measured = hosts_to_measure(to_store)
    assert {*busy} <= {*measured}
    assert find_sites(to_store, dict.fromkeys(combinations(measured, 2), 0.2 * MS)) is None


class Measured(InprocCommunicator):
    """Between threads, with the round trips that the test says, and a count of what crosses."""

    hosts: str
    far: Count
    asked: list[int]

    def round_trips(self, peers: Sequence[int], call: Call) -> list[float]:
        self.asked.append(self.rank)
        own = self.hosts[self.rank]
        return [0.2 * MS if self.hosts[peer] == own else 10 * MS for peer in peers]


def run_learning(
    hosts: str, names: Sequence[str] = (), *, known: bool = True, seem: str = ""
) -> tuple[set[bytes], list[int]]:
    """Reduce among members each on a host of its own at ``hosts``, which to the store ``seem`` to
    be elsewhere; return what they got, as bytes, and who measured.
    """
    asked: list[int] = []
    to_store, _ = trips(seem or hosts)

    def make(membership: Membership, table: Thresholds) -> HierarchicalCommunicator:
        rank = membership.rank
        site = names[rank] if names else ""
        place = Place(f"host {rank}", site=site, round_trip=to_store[rank] if known else None)

        def across(membership: Membership, table: Thresholds | None) -> Measured:
            made = Measured(membership, table)
            made.hosts, made.asked = hosts, asked
            return made

        return HierarchicalCommunicator(membership, table, place, across, InprocCommunicator)

    def body(member: Member) -> bytes:
        values = np.random.default_rng(member.rank).normal(size=101).astype(np.float32)
        member.all_reduce(values, ReduceOp.SUM)
        everybody = [np.random.default_rng(rank).normal(size=101) for rank in range(len(hosts))]
        np.testing.assert_allclose(values, np.sum(everybody, axis=0), 1e-4, 1e-4)
        return values.tobytes()

    results = set(run_group(Transport("learning", make), len(hosts), body, TINY))
    return results, sorted(asked)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are as the test makes them, though its store knows no round trip."""
    monkeypatch.setattr(Place, "seen_from", lambda place, _store: place)


@pytest.mark.usefixtures("given")
def test_learnt_sites_are_as_good_as_named_ones(caplog: pytest.LogCaptureFixture) -> None:
    named, nobody = run_learning("ababcb", ["x", "y", "x", "y", "z", "y"])
    with caplog.at_level(logging.INFO, "meshlib.transport"):
        learnt, measured = run_learning("ababcb")
    assert learnt == named
    assert (nobody, measured) == ([], [0, 1, 3, 4, 5])
    assert "3 sites learnt" in caplog.text
    assert "[0, 2] | [1, 3, 5] | [4]" in caplog.text
    flat, _ = run_learning("ababcb", known=False)
    assert len(named) == len(flat) == 1


@pytest.mark.usefixtures("given")
def test_only_those_measure_who_may_be_far_and_one_who_is_near(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert run_learning("aaaa")[1] == []
    assert run_learning("aaba")[1] == [0, 2]
    with caplog.at_level(logging.INFO, "meshlib.transport"):
        busy, measured = run_learning("aaaa", seem="aaba")
    assert "learnt" not in caplog.text
    assert (busy, measured) == (run_learning("aaaa", known=False)[0], [0, 2])


@pytest.mark.usefixtures("given")
def test_an_abort_ends_the_wait_for_who_does_not_measure() -> None:
    calls: dict[int, Call] = {}

    def make(membership: Membership, table: Thresholds) -> HierarchicalCommunicator:
        place = Place(f"host {membership.rank}", round_trip=10 * MS)
        return HierarchicalCommunicator(
            membership, table, place, InprocCommunicator, InprocCommunicator
        )

    def body(member: Member) -> str:
        if member.rank == 3:
            until = time.monotonic() + LONG
            while len(calls) < 3 or any(call.waiting_for is None for call in calls.values()):
                assert time.monotonic() < until
                time.sleep(0.001)
            for comm in member.shared.values():
                comm.abort("rank 3 is lost")
            return ""
        member.shared[str(member.rank)] = member.comm
        calls[member.rank] = call = member.call(Kind.BARRIER)
        with pytest.raises(CommunicatorAbortedError) as caught:
            member.comm.barrier(call)
        return str(caught.value)

    found = run_group(Transport("learning", make), 4, body)
    assert found == ["rank 3 is lost"] * 3 + [""]


def test_places_tell_how_far_the_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHLIB_LEARN_SITES", raising=False)
    with TCPStore("127.0.0.1", 0, is_master=True, secret=None) as store:
        place = this_place().seen_from(store)
        assert place.round_trip is not None
        assert place.round_trip > 0
        monkeypatch.setattr(store._connection, "_sock", None)
        assert store.round_trip == place.round_trip  # of the time when it connected
        monkeypatch.undo()
        assert Place.decode(place.encode()) == place
        monkeypatch.setenv("MESHLIB_LEARN_SITES", "0")
        assert this_place().seen_from(store).round_trip is None
    assert this_place().seen_from(HashStore()).round_trip is None


def test_who_does_not_tell_has_none_learn() -> None:
    places = [Place(f"host {n}", round_trip=10 * MS if n else None) for n in range(3)]
    assert Placement.of(places).to_store == ()
    places[0] = Place("host 0", round_trip=0.0001)
    placement = Placement.of(places)
    assert placement.to_store == (0.0001, 10 * MS, 10 * MS)
    assert Placement.decode(placement.encode(), 3) == placement


def test_connections_are_timed() -> None:
    with listen() as listener, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # does not listen, and nobody else gets the port
        nowhere = ("255.255.255.255", 1)  # what no way leads to fails at once
        addresses = [listener.getsockname()[:2], silent.getsockname(), nowhere]
        found = time_connections(addresses, 30.0)
        assert found[0] > 0
        assert found[1:] == [0.0, 0.0]
        for _ in range(ATTEMPTS):
            sock = listener.accept()[0]
            assert round_trip_of(sock) > 0
            sock.close()
            assert round_trip_of(sock) == 0


def test_the_least_of_a_few_connections_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was held up, by a lost packet say, makes nobody far."""
    said = [0.050, 0.0002, 0.030]
    monkeypatch.setattr(round_trip, "round_trip_of", lambda _sock: said.pop())
    with listen() as listener:
        assert time_connections([listener.getsockname()[:2]], 30.0) == [0.0002]
    assert said == []
