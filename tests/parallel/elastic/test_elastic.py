"""Training goes on without lost ranks, and with those that come: as if nothing had happened."""

from __future__ import annotations

import pytest
from elastic_ranks import ThreadJob, check, train

from meshlib.job.current import current_world


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
