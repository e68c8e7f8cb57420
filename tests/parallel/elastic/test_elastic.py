"""Training goes on without lost ranks, and with those that come: as if nothing had happened."""

from __future__ import annotations

import math
import random
import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib._job.current import current_world
from parallel import DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard, optim
from parallel.elastic import ElasticMesh
from tests.support.parallel.elastic_ranks import (
    WAIT,
    KilledError,
    ThreadJob,
    backward,
    check,
    make_batches,
    make_model,
    train,
)


def rank():
    return current_world().rank


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_without_a_failure(kind):
    log = []
    shape = (3,) if kind == "ddp" else (2, 2)
    job = ThreadJob(lambda job: train(job, shape, 7, kind=kind, log=log), 3 if kind == "ddp" else 4)
    check(job.join(), log, 7)


@pytest.mark.parametrize("where", ["begin", "computed", "ended"])
@pytest.mark.parametrize("backend", ["inproc", "tcp", "shm"])
def test_a_lost_rank(where, backend):
    log = []

    def program(job):
        def event(elastic, step, now):
            if rank() == 1 and step.number == 2 and now == where:
                job.kill()

        return train(job, (4,), 6, event=event, log=log)

    results = ThreadJob(program, 4, backend=backend).join()
    assert sorted(results) == [0, 2, 3]
    assert all(one[2] == [0, 2, 3] for one in results.values())
    check(results, log, 6)


def kill_at(job, plan, *, replace=True):
    """Return an event that kills ranks: ``plan`` has (rank, step, where); others come for them."""
    plan = set(plan)

    def event(elastic, step, where):
        me = rank()
        if (me, step.number, where) in plan:
            plan.discard((me, step.number, where))
            if replace:
                job.start()
            job.kill()

    return event


@pytest.mark.parametrize("backend", ["inproc", "tcp", "shm"])
def test_a_replacement_takes_the_place(backend):
    log = []

    def program(job):
        event = kill_at(job, [(1, 2, "computed")])
        return train(job, (3,), 30, event=event, log=log, min_size=3)

    results = ThreadJob(program, 3, backend=backend).join()
    assert all(one[2] == [0, 3, 2] for one in results.values())
    check(results, log, 30, [0, 2, 3])


def test_the_others_go_on_until_the_replacement_is_there():
    """It is let in at a step boundary, where all members let it in."""
    log = []

    def program(job):
        def event(elastic, step, where):
            me = rank()
            if me == 0 and step.number == 1 and where == "begin":
                job.kill()
            if me == 1 and step.number == 3 and where == "ended":
                job.start()
            if elastic.size == 2 and step.number == 5 and where == "computed":
                membership = current_world().membership
                assert membership.wait_for_change(lambda: membership.waiting, WAIT)

        return train(job, (3,), 9, event=event, log=log)

    results = ThreadJob(program, 3).join()
    assert all(one[2] == [1, 2, 3] for one in results.values())
    check(results, log, 9, [1, 2, 3])
    members = {number: ranks for me, number, _, ranks in log if me in results}
    assert members[1] == members[3] == [1, 2]
    assert members[6] == members[8] == [1, 2, 3]


@pytest.mark.parametrize("counted", [True, False])
def test_a_vote_that_broke_off_for_some(counted, monkeypatch):
    """A step that one rank has committed is committed by all; any other step is repeated."""
    log = []
    broken = []
    vote = ElasticMesh._vote

    def break_off(self, step):
        if rank() != 2 or step.number != 3 or broken:
            return vote(self, step)
        broken.append(step)
        step.voted = self._batch()
        if counted:  # the others have got its voice, and it has not heard so
            self._votes.all_reduce(np.array([1], np.int32), dist.ReduceOp.MIN)
        raise dist.DistBackendError("the connection broke")

    monkeypatch.setattr(ElasticMesh, "_vote", break_off)
    results = ThreadJob(lambda job: train(job, (3,), 6, log=log), 3).join()
    check(results, log, 6, [0, 1, 2])


def test_what_fails_for_ever_ends_on_all():
    def program(job):
        def event(elastic, step, where):
            if where == "begin" and step.number == 2:
                raise dist.CollectiveTimeoutError("as it does each time")

        return train(job, (2,), 6, event=event)

    with pytest.raises(dist.DistError):
        ThreadJob(program, 2).join()


def test_the_programs_own_error_is_raised():
    log = []

    def program(job):
        def event(elastic, step, where):
            if rank() == 1 and step.number == 2 and where == "computed":
                raise ZeroDivisionError

        return train(job, (3,), 4, event=event, log=log)

    job = ThreadJob(program, 3)
    with pytest.raises(ZeroDivisionError):
        job.join()
    check(job.results, log, 4, [0, 2])


def refused(state_of):
    """The errors of ``steps`` about a state, on the ranks of a job and on one that comes later."""

    def program(job):
        mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        with ElasticMesh(mesh, "dp", timeout=job.timeout) as elastic:
            state = state_of(elastic.mesh["dp"])
            with pytest.raises(ValueError) as caught:
                next(elastic.steps(state, 1))
            return str(caught.value)

    return ThreadJob(program, 3).join().values()


def test_an_optimizer_whose_state_goes_with_a_lost_rank_is_refused():
    def state_of(mesh):
        model = DistributedDataParallel(make_model(), mesh)
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, mesh, lr=0.1, momentum=0.9)
        return {"model": model, "optimizers": [zero]}

    for text in refused(state_of):
        assert "state['optimizers'][0] is a ZeroRedundancyOptimizer, which has a part" in text


def test_parameters_that_are_split_over_the_elastic_dim_are_refused():
    for text in refused(lambda mesh: {"model": fully_shard(make_model(), mesh)}):
        assert "state['model']['0.weight'] is split over the elastic dim 'dp'" in text


def test_a_commit_that_communicates_is_no_loss_of_a_rank():
    """An optimizer that the loop does not know of: the survivors' steps would differ."""

    def program(job):
        mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        with ElasticMesh(mesh, "dp", timeout=job.timeout) as elastic:
            model = DistributedDataParallel(make_model(), elastic.mesh["dp"])
            zero = ZeroRedundancyOptimizer(
                model.parameters(), optim.SGD, elastic.mesh["dp"], lr=0.1, momentum=0.9
            )
            for step in elastic.steps({"model": model}, 6, batches=make_batches()):
                with step:
                    if rank() == 1 and step.number == 2:
                        job.kill()
                    backward(model, step.share.samples, step.share.weight)
                    step.on_commit(zero.step)
        return elastic.committed

    job = ThreadJob(program, 3)
    with pytest.raises(RuntimeError, match=r"on_commit of step [12] .* does not communicate"):
        job.join()
    assert not job.results
    assert sorted(job.errors) == [0, 2]


def test_too_few_are_left():
    def program(job):
        event = kill_at(job, [(0, 1, "begin")], replace=False)
        return train(job, (2,), 4, event=event, min_size=2, timeout=0.1, join_timeout=0.1)

    with pytest.raises(dist.DistBackendError, match="too few are left for epoch 1"):
        ThreadJob(program, 2).join()


def test_a_batch_policy_that_scales():
    log = []

    def program(job):
        event = kill_at(job, [(1, 2, "computed")], replace=False)
        return train(job, (3,), 5, event=event, policy="scale", log=log)

    results = ThreadJob(program, 3).join()
    check(results, log, 5, [0, 2], policy="scale")
    sizes = {number: sum(len(s) for _, n, s, _ in log if n == number) for number in range(5)}
    assert sizes[0] == sizes[1] == 36
    assert sizes[3] == sizes[4] == 24


def test_hsdp_loses_a_shard_and_its_mate_stays_with_a_replacement():
    log = []

    def program(job):
        event = kill_at(job, [(2, 3, "computed")])
        return train(job, (2, 2), 12, kind="hsdp", event=event, log=log, min_size=2)

    results = ThreadJob(program, 4).join()
    check(results, log, 12, [0, 1, 3, 4])
    assert all(one[2] == [[0, 1], [3, 4]] for one in results.values())


def test_hsdp_goes_on_with_one_replica_and_the_spare_shard_waits():
    log = []

    def program(job):
        event = kill_at(job, [(2, 3, "begin")], replace=False)
        return train(job, (2, 2), 8, kind="hsdp", event=event, log=log)

    results = ThreadJob(program, 4).join()
    spare = results.pop(3)
    assert spare[1] == 3
    check(results, log, 8, [0, 1])


@pytest.mark.parametrize("seed", range(6))
def test_chaos(seed):
    """Ranks are killed at random, all but one at worst, and replaced."""
    log = []
    generator = random.Random(seed)
    kind, shape = generator.choice(
        [("ddp", (4,)), ("ddp", (3,)), ("hsdp", (2, 2)), ("hsdp", (3, 2))]
    )
    until, size = 12, math.prod(shape)
    spots = ["begin", "computed", "ended"]
    plan = {
        (victim, generator.randrange(until), generator.choice(spots))
        for victim in generator.sample(range(1 if kind == "ddp" else 2, size + 2), size - 1)
    }

    def program(job):
        return train(job, shape, until, kind=kind, event=kill_at(job, plan), log=log)

    results = ThreadJob(program, size).join()
    check({r: one for r, one in results.items() if one[1] == until}, log, until)


def test_a_rank_that_is_lost_while_the_others_move(monkeypatch):
    """They have begun to make what the next epoch needs, and do so again for the one after."""
    log, moving = [], threading.Barrier(3)
    move_to = DistributedDataParallel.move_to

    def move(self, mesh):
        if current_world().membership.epoch.number == 1:
            moving.wait(WAIT)
            if rank() == 2:
                raise KilledError
        move_to(self, mesh)

    monkeypatch.setattr(DistributedDataParallel, "move_to", move)

    def program(job):
        event = kill_at(job, [(1, 2, "begin")], replace=False)
        return train(job, (4,), 5, event=event, log=log)

    check(ThreadJob(program, 4).join(), log, 5, [0, 3])
