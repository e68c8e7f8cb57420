"""Ranks that wait for each other in different calls are told so, long before a deadline."""

import time

import numpy as np
import pytest

import meshlib as dist
from meshlib._calls.members import even
from meshlib._diagnosis import stalls
from meshlib._diagnosis.tangles import CallStatus, find_tangle, tangle_message
from meshlib._recording.call_report import CallReport
from meshlib._recording.recorder import COLLECTIVE
from meshlib.testing import run_ranks
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._waiting.deadline import Deadline


def stand(rank, group, sequence, ranks, reached, root=NO_ROOT):
    header = CallHeader(sequence, 0, root, Kind.BARRIER, 0, 0)
    call = CallReport(group, header, COLLECTIVE, 0, "site")
    return CallStatus(rank, even(ranks) or ranks, f"group {group!r}", reached, [call])


def test_two_groups_in_another_order_are_a_tangle():
    a = stand(0, "A", 1, (0, 1), {"A": 1})
    b = stand(1, "B", 1, (0, 1), {"B": 1})
    assert find_tangle({0: a, 1: b}) == [0, 1]


def test_waiting_in_one_call_or_for_one_who_computes_is_none():
    a = stand(0, "A", 2, (0, 1, 2), {"A": 2})
    b = stand(1, "A", 2, (0, 1, 2), {"A": 2})
    assert find_tangle({0: a, 1: b}) is None


def test_a_rank_that_went_ahead_is_no_tangle():
    # Rank 0 has done A#1 and waits in B; rank 1's data of A#1 are still on their way.
    ahead = stand(0, "B", 1, (0, 1), {"A": 1, "B": 1})
    behind = stand(1, "A", 1, (0, 1), {"A": 1})
    assert find_tangle({0: ahead, 1: behind}) is None


def test_a_circle_of_three_groups_without_the_bystander():
    ring = {
        0: stand(0, "A", 1, (0, 1), {"A": 1}),
        1: stand(1, "B", 1, (1, 2), {"B": 1}),
        2: stand(2, "C", 1, (2, 0), {"C": 1}),
    }
    assert find_tangle(ring) == [0, 1, 2]
    waiting = stand(3, "D", 1, (3, 0), {"D": 1})
    assert 0 in (find_tangle({**ring, 3: waiting}) or [])


def test_different_headers_in_one_call_contradict():
    a = stand(0, "A", 1, (0, 1), {"A": 1}, root=1)
    b = stand(1, "A", 1, (0, 1), {"A": 1}, root=2)
    assert find_tangle({0: a, 1: b}) == [0, 1]


def test_the_table_has_those_beside_a_tangle_too():
    a = stand(0, "A", 1, (0, 1, 2, 3), {"A": 1})
    b = stand(1, "B", 1, (0, 1, 2, 3), {"B": 1})
    c = stand(2, "C", 7, (0, 1, 2, 3), {"C": 7})
    text = tangle_message({0: a, 1: b}, {2: c, 3: None})
    assert "ranks [0, 1] wait for each other" in text
    rows = [line.split() for line in text.splitlines()[1:]]
    assert [row[0] for row in rows] == ["rank", "0", "1", "2", "3"]
    assert rows[3][1] == "call"
    assert "in no call" in text.splitlines()[-1]


def both_raise(program, size=2):
    def guarded():
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            program()
        return str(caught.value)

    return run_ranks(guarded, size)[0]


def test_calls_on_two_groups_of_the_same_members():
    def program():
        a, b = dist.new_group(group_desc="a"), dist.new_group(group_desc="b")
        dist.all_reduce(np.ones(1), group=a if dist.get_rank() else b)

    text = both_raise(program)
    assert "ranks [0, 1] wait for each other" in text
    assert "group 'a'" in text
    assert "group 'b'" in text
    assert "test_stalls.py" in text


def test_groups_used_in_another_order():
    def program():
        rank = dist.get_rank()
        # 0 waits for 1 in {0, 1}, 1 for 2 in {1, 2}, 2 for 0 in {2, 0}.
        order = [[rank, (rank + 1) % 3], [(rank + 2) % 3, rank]]
        for group in [dist.new_group(ranks) for ranks in order]:
            dist.barrier(group=group)

    assert "none can continue" in both_raise(program, 3)


def test_different_roots_where_nobody_sends():
    def program():
        # Each of the two waits for the other as the source.
        dist.broadcast(np.ones(1), src=1 - dist.get_rank())

    text = both_raise(program)
    assert "root=0" in text
    assert "root=1" in text


def test_slow_ranks_are_not_stuck():
    def program():
        a, b = dist.new_group(), dist.new_group()
        if dist.get_rank() == 0:
            time.sleep(1.2)
        dist.barrier(group=a)
        if dist.get_rank() == 1:
            time.sleep(1.2)
        dist.barrier(group=b)
        return "done"

    assert run_ranks(program, 2) == ["done"] * 2


def test_waiting_for_a_slow_rank_asks_only_for_what_is_new(monkeypatch):
    queries, posted = [], []
    collect, pack = stalls._collect, CallStatus.pack

    def count(store, mine, known):
        queries.append(1)
        return collect(store, mine, known)

    monkeypatch.setattr(stalls, "_collect", count)
    monkeypatch.setattr(CallStatus, "pack", lambda self: posted.append(self.rank) or pack(self))

    def program():
        if dist.get_rank() == 0:
            deadline = Deadline.after(30)
            while len(posted) < 2 or not queries:
                assert not deadline.expired
                time.sleep(0.01)
            time.sleep(0.5)
            assert sorted(posted) == [1, 2]
            # Once when one has come to a standstill, and once more if the other did so later.
            assert 1 <= len(queries) <= 2
        dist.barrier()

    run_ranks(program, 3)


def test_what_is_posted_does_not_grow_with_the_group():
    def size(ranks):
        return len(stand(0, "A", 1, ranks, {"A": 1}).pack())

    assert size(tuple(range(5000))) < size((0, 1)) + 20
    for ranks in [(0,), (4, 0), (3, 1, 2), (0, 2, 4), (9, 6, 3), (0, 1, 2, 4), tuple(range(99))]:
        one = stand(0, "A", 1, ranks, {"A": 1})
        assert tuple(CallStatus.unpack(one.pack().encode()).ranks) == ranks


def test_a_tangle_among_thousands_is_found_in_time_linear_in_them():
    everybody = range(4000)
    waiting = {r: stand(r, "A", 2, everybody, {"A": 2, "B": 0}) for r in everybody}
    assert find_tangle(waiting) is None  # rather than 4000 * 4000 comparisons
    odd = stand(7, "B", 1, everybody, {"A": 1, "B": 1})
    assert find_tangle({**waiting, 7: odd}) == list(everybody)
    other = stand(3999, "A", 2, everybody, {"A": 2}, root=2)
    assert find_tangle({**waiting, 3999: other}) == [0, 3999]
