"""The placement of members on hosts, as the hierarchical transport sees it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport._errors import DistNetworkError
from transport._hierarchical.hosts import MembersByHost
from transport._place import Place, this_place

# ---------------------------------------------------------------- who is where


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), min_size=1, max_size=12))
def test_placement_has_every_member_once(places: list[tuple[str, bool]]) -> None:
    members = [Place(machine, "" if memory else "none") for machine, memory in places]
    placement = MembersByHost.of(members)
    assert sorted(rank for ranks in placement.hosts for rank in ranks) == list(range(len(members)))
    firsts = [ranks[0] for ranks in placement.hosts]
    assert firsts == sorted(firsts)
    for rank, host in enumerate(members):
        number, index = placement.find(rank)
        assert placement.hosts[number][index] == rank
        assert {members[other].machine for other in placement.hosts[number]} == {host.machine}
    for ranks, memory in zip(placement.hosts, placement.memory, strict=True):
        share = not any(members[rank].obstacle for rank in ranks)
        assert memory == (share and len(ranks) > 1)
    assert [Place.decode(host.encode()) for host in members] == members


def test_a_place_that_is_none_is_refused() -> None:
    for data in (b"", b"3", b'{"machine": "a", "address": "x"}', b'{"machines": "a"}'):
        with pytest.raises(DistNetworkError, match="expected the place of a rank"):
            Place.decode(data)


def test_this_place_is_the_same_for_all_callers() -> None:
    assert this_place() == this_place()
    assert this_place().machine
