"""Dividing ranks into groups; asking who is where."""

from datetime import timedelta

import numpy as np
import pytest

import meshlib as dist
from meshlib._calls.spec import CallSpec
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.testing import run_ranks
from transport._calls.header import Kind


def total(group):
    return dist.all_reduce(np.array([float(dist.get_rank())]), group=group)[0]


def test_new_subgroups_cuts_neighbours():
    def program():
        own, every = dist.new_subgroups(group_size=2)
        assert [dist.get_process_group_ranks(g) for g in every] == [[0, 1], [2, 3]]
        assert own is every[dist.get_rank() // 2]
        sums = total(own)
        for one in every:
            dist.destroy_process_group(one)
        return sums

    assert run_ranks(program, 4) == [1.0, 1.0, 5.0, 5.0]


def test_new_subgroups_of_a_host(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert run_ranks(lambda: total(dist.new_subgroups()[0]), 6) == [3.0] * 3 + [12.0] * 3


def test_new_subgroups_of_a_group():
    def program():
        odd = dist.new_group([1, 3, 5, 7])
        if odd.rank() < 0:
            with pytest.raises(ValueError, match="cannot call new_subgroups"):
                dist.new_subgroups(2, odd)
            return None
        return dist.get_process_group_ranks(dist.new_subgroups(2, odd)[0])

    assert run_ranks(program, 8)[1::2] == [[1, 3], [1, 3], [5, 7], [5, 7]]


def test_new_subgroups_by_enumeration():
    def program():
        own, every = dist.new_subgroups_by_enumeration([[0, 2], [3, 1]], group_desc="pairs")
        assert len(every) == 2
        if dist.get_rank() == 4:
            assert own is None
            return None
        assert own.group_desc == "pairs"
        return total(own)

    assert run_ranks(program, 5) == [2.0, 4.0, 2.0, 4.0, None]


def test_split_group_counts_in_the_parent():
    def program():
        parent = dist.new_group([1, 2, 3, 4], timeout=timedelta(seconds=17))
        if parent.rank() < 0:
            return None
        own = dist.split_group(parent, [[3, 0], [1]], group_desc="part")
        if own is None:
            return "none"
        assert own.timeout == timedelta(seconds=17)
        return dist.get_process_group_ranks(own), total(own)

    one = ([1, 4], 5.0)
    assert run_ranks(program, 5) == [None, one, ([2], 2.0), "none", one]


def test_groups_that_overlap_work_side_by_side():
    def program():
        rank = dist.get_rank()
        pairs = [dist.new_group([i, i + 1]) for i in range(3)]
        works = [
            dist.all_reduce(np.array([10.0 * i + rank]), group=pair, async_op=True)
            for i, pair in enumerate(pairs)
        ]
        return [work.result()[0] for work in works if work is not None]

    assert run_ranks(program, 4) == [[1.0], [1.0, 23.0], [23.0, 45.0], [45.0]]


def test_ranks_may_stay_as_given():
    def program():
        group = dist.new_group([2, 0, 1], sort_ranks=False)
        assert dist.get_process_group_ranks(group) == [2, 0, 1]
        return dist.broadcast(np.array([float(dist.get_rank())]), group=group, group_src=0)[0]

    assert run_ranks(program, 3) == [2.0] * 3


def test_a_group_of_which_this_rank_is_no_member_equals_non_group_member():
    def program():
        group = dist.new_group([0])
        return (
            group == dist.GroupMember.NON_GROUP_MEMBER,
            group != dist.GroupMember.NON_GROUP_MEMBER,
        )

    assert run_ranks(program, 2) == [(False, True), (True, False)]


BAD = {
    "no divisor": (
        lambda: dist.new_subgroups(2),
        "group_size is 2; expected a divisor of 3",
    ),
    "no environment": (dist.new_subgroups, "group_size is None and .* LOCAL_WORLD_SIZE"),
    "twice": (
        lambda: dist.new_subgroups_by_enumeration([[0, 1], [1, 2]]),
        "ranks_per_subgroup_list: rank 1 is in list 0 and in list 1",
    ),
    "nothing": (lambda: dist.new_subgroups_by_enumeration([]), "ranks_per_subgroup_list is empty"),
    "no split": (dist.split_group, "split_ranks is None"),
    "overlap": (lambda: dist.split_group(None, [[0], [0]]), "rank 0 is in list 0 and in list 1"),
    "strange": (
        lambda: dist.split_group(None, [[0, 5]]),
        r"split_ranks\[0\] is \[0, 5\]; expected one or more ranks from 0 to 2",
    ),
    "empty": (lambda: dist.split_group(None, [[0], []]), r"split_ranks\[1\] is \[\]"),
    "backend": (
        lambda: dist.split_group(None, [[0]], backend="tcp"),
        "backend 'tcp' is not among the parent's, 'cpu:inproc'",
    ),
    "group rank": (lambda: dist.get_global_rank(None, 3), "group_rank is 3; expected 0 to 2"),
    "global rank": (lambda: dist.get_group_rank(None, 3), "global rank 3 is not in"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    call, match = BAD[case]

    def program():
        with pytest.raises(ValueError, match=match):
            call()

    run_ranks(program, 3)


def test_calls_with_a_wrong_timeout_or_device_leave_the_group_usable():
    def program():
        with pytest.raises(ValueError, match="timeout must be"):
            dist.group.WORLD.barrier(timeout=-1)
        with pytest.raises(ValueError, match="no backend for arrays on 'tpu'"):
            call_queue_of(dist.group.WORLD).issue(
                CallSpec(Kind.BARRIER, lambda *_: None, device="tpu")
            )
        return total(None)

    assert run_ranks(program, 2) == [1.0, 1.0]


def test_group_questions():
    def program():
        group = dist.new_group([2, 1])
        member = dist.get_rank(group) >= 0
        assert dist.get_world_size(group) == (2 if member else -1)
        assert dist.get_global_rank(group, 0) == 1
        assert dist.get_group_rank(group, 2) == 1
        assert dist.get_backend(group) == "inproc"
        assert dist.get_backend_config(group) == "cpu:inproc"
        assert dist.get_process_group_ranks(None) == [0, 1, 2]
        return dist.get_rank(group)

    assert run_ranks(program, 3) == [-1, 0, 1]
