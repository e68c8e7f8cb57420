"""``meshlib.extend``: what it says of a job, its groups and their calls, and has them do."""

import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib import extend
from meshlib.testing import run_ranks


def test_a_job_makes_groups_and_knows_its_epoch():
    def rank():
        job = extend.Job()
        assert job.rank == dist.get_rank()
        assert (job.epoch.number, list(job.epoch.members)) == (0, [0, 1, 2])
        assert not job.joining
        assert not job.waiting
        if job.rank == 1:
            return None
        group = job.new_group([2, 0], timeout=7, desc="reversed")
        assert group in job.groups()
        x = np.array([job.rank])
        group.broadcast(x, group_src=0)
        return group.ranks, group.rank(), group.timeout.total_seconds(), int(x[0])

    assert run_ranks(rank, 3) == [((2, 0), 1, 7.0, 2), None, ((2, 0), 0, 7.0, 2)]


def test_there_is_no_job_before_it_has_begun():
    with pytest.raises(ValueError, match="init_process_group"):
        extend.Job()


def test_a_thread_of_the_rank_finds_the_job_by_the_object():
    def rank():
        job, found = extend.Job(), []
        thread = threading.Thread(target=lambda: found.append(job.groups()))
        thread.start()
        thread.join(10)
        return found == [job.groups()]

    assert run_ranks(rank, 2) == [True, True]


def test_the_members_left_agree_on_the_next_epoch():
    def rank():
        job = extend.Job()
        if job.rank == 1:
            return None
        change = job.agree_on_epoch(proposal=job.rank, excluded=[1], timeout=20)
        job.enter(change)
        x = np.ones(1)
        dist.all_reduce(x)
        return job.epoch.number, list(job.epoch.members), sorted(change.missing), x[0]

    ended = run_ranks(rank, 3)
    assert ended[0] == ended[2]
    assert ended[0] == (1, [0, 2], [1], 2.0)


def test_an_observer_sees_calls_and_may_put_another_in_their_place():
    def rank():
        seen = []

        def observer(members, header, device, run):
            seen.append((members.ranks, extend.Kind(header.kind), header.elements, device))

            def doubled(communicator, call):
                result = run(communicator, call)
                x[:] *= 2
                return result

            return doubled

        x = np.ones(3)
        group = dist.group.WORLD
        with extend.observe(group, observer):
            dist.all_reduce(x)
            again = extend.observe(group, observer)
            with pytest.raises(RuntimeError, match="already has an observer"):
                again.__enter__()
        dist.barrier()
        return seen, x.tolist()

    calls = [((0, 1), extend.Kind.ALL_REDUCE, 3, "cpu")]
    assert run_ranks(rank, 2) == [(calls, [4.0] * 3)] * 2


def test_a_call_of_ones_own_meets_the_others_collective():
    def rank():
        group = dist.group.WORLD
        if group.rank():
            group.barrier()
            return None
        made = []

        def run(communicator, call):
            communicator.barrier(call)
            made.append(call.header.kind)

        extend.issue(group, extend.CallSpec(extend.Kind.BARRIER, run))
        return made

    assert run_ranks(rank, 2)[0] == [extend.Kind.BARRIER]


def test_the_calls_in_a_block_are_recorded():
    def rank():
        group, other = dist.group.WORLD, dist.new_group([0, 1])
        group.barrier()
        with extend.recorded(group) as records:
            group.all_reduce(np.ones(2))
            other.barrier()
            group.barrier()
        group.barrier()
        return [record.kind for record in records]

    assert run_ranks(rank, 2) == [["all_reduce", "barrier"]] * 2


def test_a_derived_group_fails_alone_and_listeners_hear_of_it():
    def rank():
        group = dist.group.WORLD
        own = extend.derived_group(group, "test", "the test's")
        assert own is extend.derived_group(group, "test")
        assert (own.ranks, own.group_desc) == (group.ranks, "the test's")
        own.barrier()
        group.barrier()
        if group.rank():
            return group.barrier()
        errors = []
        extend.on_failure(own, errors.append)
        assert extend.is_idle(own)
        assert extend.failure_of(own) is None
        error = dist.DistBackendError("broken by the test")
        extend.fail(own, error)
        extend.on_failure(own, errors.append)
        assert [str(one) for one in errors] == ["broken by the test"] * 2
        assert str(extend.failure_of(own)) == "broken by the test"
        assert not extend.is_usable(own)
        assert extend.is_usable(group)
        with pytest.raises(dist.DistBackendError, match="broken by the test"):
            own.barrier()
        return group.barrier()

    run_ranks(rank, 2)
