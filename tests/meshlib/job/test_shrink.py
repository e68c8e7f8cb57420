"""``shrink_group``: those who are left agree on who that is, whatever happens meanwhile."""

from __future__ import annotations

import re
import threading
from contextlib import suppress

import numpy as np
import pytest

import meshlib as dist
from meshlib._c10d.shrink import SHRINK_ABORT, SHRINK_DEFAULT
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._job.continuing import agreement
from meshlib._job.current import current_world
from meshlib.testing import RankError, run_ranks

WAIT = 60.0
BACKENDS = ["inproc", "shm", "tcp"]


@pytest.fixture(autouse=True)
def long_probes(monkeypatch):
    """A thread that the scheduler stops for a while is not to be taken for a silent rank."""
    monkeypatch.setattr(agreement, "LIFE_SECONDS", WAIT)
    monkeypatch.setattr(agreement, "LEASE_SECONDS", WAIT)


def vanish():
    """End as a rank that is killed does; the function that calls it returns."""
    current_world().announce_exit("was killed")


def begin():
    """Make a first call that all ranks have ended when this returns."""
    world = current_world()
    found = total()
    world.store.add("begun", 1)
    while int(world.store.add("begun", 0)) < world.size:
        world.membership.wait_for_change(lambda: False, 0.001)
    return found


def fail_on(error=dist.RankFailedError):
    """Make calls until one raises ``error``."""

    def go_on():
        while True:
            dist.all_reduce(np.ones(3))

    with pytest.raises(error):
        go_on()


def total():
    return dist.all_reduce(np.ones(3))[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_survivors_go_on(backend):
    def rank():
        begin()
        if dist.get_rank() == 1:
            return vanish()
        fail_on()
        before = dist.group.WORLD
        group = dist.shrink_group([])
        assert group is dist.group.WORLD
        assert group.id != before.id
        assert group.backends == before.backends
        with pytest.raises(dist.DistError):
            before.all_reduce(np.ones(3))
        return total(), dist.get_rank(), dist.get_world_size(), group.ranks

    found = run_ranks(rank, 4, backend=backend)
    assert found == [
        (3, 0, 3, (0, 2, 3)),
        None,
        (3, 1, 3, (0, 2, 3)),
        (3, 2, 3, (0, 2, 3)),
    ]


def test_two_failures_at_once_and_one_after_the_other():
    here = threading.Barrier(4)

    def rank():
        me = dist.get_rank()
        begin()
        if me in (1, 2):
            return vanish()
        fail_on()
        first = dist.shrink_group([]).ranks
        assert total() == 4
        here.wait(WAIT)
        if me == 0:
            return vanish()
        fail_on()
        return first, dist.shrink_group([]).ranks, total()

    found = run_ranks(rank, 6)
    assert found[3:] == [((0, 3, 4, 5), (3, 4, 5), 3)] * 3


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_failure_while_agreeing(victim):
    """The others do not wait for a member that is lost after it has spoken, even the chair."""
    spoken = threading.Event()

    class SpokenError(Exception):
        pass

    def rank():
        me = dist.get_rank()
        begin()
        if me == 2:
            return vanish()
        fail_on()
        if me == victim:
            agreed = current_world().membership.agreed

            def speak_and_vanish(name):
                spoken.set()
                vanish()
                raise SpokenError

            current_world().membership.agreed = speak_and_vanish
            with pytest.raises(SpokenError):
                dist.shrink_group([])
            current_world().membership.agreed = agreed
            return None
        assert spoken.wait(WAIT)
        group = dist.shrink_group([])
        return group.ranks, total()

    found = run_ranks(rank, 4)
    left = tuple(one for one in range(4) if one not in (2, victim))
    assert [found[one] for one in left] == [(left, 2)] * 2


def test_a_survivor_that_is_slow_is_waited_for(monkeypatch):
    monkeypatch.setattr(agreement, "PROBE_AFTER_SECONDS", 0.01)
    probed = threading.Event()
    probe = agreement.Agreement._probe

    def probe_and_signal(self, ranks):
        probe(self, ranks)
        probed.set()

    monkeypatch.setattr(agreement.Agreement, "_probe", probe_and_signal)

    def rank():
        me = dist.get_rank()
        begin()
        if me == 1:
            return vanish()
        if me == 3:  # computes; the others want a sign of life, which it gives
            assert probed.wait(WAIT)
        fail_on()
        return dist.shrink_group([]).ranks, total()

    found = run_ranks(rank, 4)
    assert [one for one in found if one] == [((0, 2, 3), 3)] * 3


def test_who_does_not_come_in_time_is_left_out_and_finds_out():
    shrunk = threading.Event()

    def rank():
        me = dist.get_rank()
        begin()
        if me == 1:
            return vanish()
        fail_on()
        if me == 2:
            assert shrunk.wait(WAIT)
            with pytest.raises(dist.RankFailedError, match="rank 2 is excluded from epoch 1"):
                dist.shrink_group([])
        else:
            dist.shrink_group([], timeout=0.05)
            shrunk.set()
        return dist.group.WORLD.ranks, total()

    assert run_ranks(rank, 3) == [((0,), 1), None, ((2,), 1)]


def test_a_silent_rank_is_left_out(monkeypatch):
    monkeypatch.setattr(agreement, "PROBE_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(agreement, "LIFE_SECONDS", 0.2)
    over = threading.Barrier(3)

    def rank():
        me = dist.get_rank()
        dist.barrier()
        if me == 2:
            world = current_world()
            world._watcher.close()  # a stopped process: nothing of it answers
            over.wait(WAIT)
            return None
        members = []
        # A thread that the scheduler stops may be left out as well; all but that is an error.
        with suppress(dist.RankFailedError):
            members = dist.shrink_group([]).ranks
        over.wait(WAIT)
        return members

    found = run_ranks(rank, 3)
    assert all(2 not in one for one in found[:2])
    assert any(found[:2])


def test_a_rank_that_is_cut_off_from_the_store_must_not_go_on():
    over = threading.Barrier(3)

    def rank():
        me = dist.get_rank()
        dist.barrier()
        if me == 1:
            world = current_world()
            world.store.close()
            with pytest.raises(dist.DistStoreError):
                dist.shrink_group([])
            vanish_elsewhere.set()
            over.wait(WAIT)
            return None
        assert vanish_elsewhere.wait(WAIT)
        group = dist.shrink_group([1])
        over.wait(WAIT)
        return group.ranks

    vanish_elsewhere = threading.Event()
    assert run_ranks(rank, 3) == [(0, 2), None, (0, 2)]


def test_planned_and_named_differently():
    """Nobody has failed; what the members name adds up."""

    def rank():
        me = dist.get_rank()
        begin()
        if me in (1, 4):
            return None
        group = dist.shrink_group([1] if me == 0 else [4, 1] if me == 2 else [])
        return group.ranks, total()

    found = run_ranks(rank, 5)
    assert [one for one in found if one] == [((0, 2, 3), 3)] * 3


def test_groups_that_lost_nobody_are_kept():
    def rank():
        me = dist.get_rank()
        mesh = dist.init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        tp = mesh["tp"].process_group
        tp.all_reduce(np.ones(1))
        dp = mesh["dp"].process_group
        own = dist.new_group([2 * (me // 2), 2 * (me // 2) + 1])
        begin()
        if me == 1:
            return vanish()
        fail_on()
        dist.shrink_group([])
        if me == 0:
            return None
        smaller = mesh.without([0, 1], "dp")
        assert smaller["tp"].process_group is tp
        assert not call_queue_of(own).state.destroyed
        assert own.all_reduce(np.ones(1))[0] == tp.all_reduce(np.ones(1))[0] == 2
        assert smaller["dp"].process_group is not dp
        return smaller["dp"].all_reduce(np.ones(1))[0], smaller.all_reduce(np.ones(1))[0]

    assert run_ranks(rank, 6)[2:] == [(2, 4)] * 4


def test_a_group_whose_members_stand_in_different_calls_is_not_kept():
    def rank():
        me = dist.get_rank()
        pair = dist.new_group([2, 3])
        begin()
        if me == 1:
            return vanish()
        works = [pair.all_reduce(np.ones(1), async_op=True)] if me == 2 else []
        fail_on()
        dist.shrink_group([])
        for work in works:
            with pytest.raises(dist.DistBackendError, match="epoch 1"):
                work.wait()
        if me >= 2:
            with pytest.raises(dist.DistBackendError, match="epoch 1"):
                pair.all_reduce(np.ones(1))
            return dist.new_group([2, 3]).all_reduce(np.ones(1))[0]
        return None

    assert run_ranks(rank, 4)[2:] == [2, 2]


def test_another_group_than_the_default_one():
    def rank():
        me = dist.get_rank()
        group = dist.new_group([3, 1, 2, 0], sort_ranks=False)
        group.barrier()
        first = second = None
        if me != 1:
            first = dist.shrink_group([1], group)
            assert first.all_reduce(np.ones(1))[0] == 3
        if me in (0, 3):
            second = dist.shrink_group([1], first)
            assert second.all_reduce(np.ones(1))[0] == 2
        assert total() == 4  # the epoch is the same
        return first and first.ranks, second and second.ranks

    found = run_ranks(rank, 4)
    assert found == [((3, 2, 0), (3, 0)), (None, None), ((3, 2, 0), None), ((3, 2, 0), (3, 0))]


@pytest.mark.parametrize("abort", [False, True])
def test_a_call_under_way_is_ended_by_abort(abort):
    issued, over = threading.Barrier(2), threading.Barrier(3)

    def rank():
        if dist.get_rank() == 2:
            over.wait(WAIT)
            return None
        group = dist.group.WORLD
        work = group.all_reduce(np.ones(1), async_op=True)  # rank 2 never comes
        issued.wait(WAIT)
        dist.shrink_group([2], group, SHRINK_ABORT if abort else SHRINK_DEFAULT)
        with pytest.raises(dist.DistBackendError, match="shrinks" if abort else "epoch 1"):
            work.wait()
        over.wait(WAIT)
        return total()

    assert run_ranks(rank, 3) == [2, 2, None]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([0],), ValueError, "includes this rank, 0"),
        (([2],), ValueError, "ranks_to_exclude has [2]; expected ranks from 0 to 1"),
        (([1, 1],), ValueError, "a rank twice"),
        ((["1"],), TypeError, "ranks_to_exclude"),
        (([1], None, 7), ValueError, "shrink_flags is 7"),
        (([1], 3), TypeError, "group must be"),
    ],
)
def test_wrong_arguments(arguments, error, text):
    def rank():
        if dist.get_rank() == 0:
            with pytest.raises(error, match=re.escape(text)):
                dist.shrink_group(*arguments)
        dist.barrier()

    run_ranks(rank, 2)


def test_a_bystander_cannot_shrink_it():
    def rank():
        group = dist.new_group([0])
        if dist.get_rank() == 1:
            dist.shrink_group([], group)

    with pytest.raises(RankError, match="rank 1 is not in"):
        run_ranks(rank, 2)
