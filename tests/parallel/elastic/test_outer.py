"""DiLoCo and local SGD: rounds that all replicas commit, or do again from their beginning."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as dist
from meshlib._job.current import current_world
from parallel import optim
from parallel.elastic import DiLoCo, ElasticMesh
from tests.support.parallel.elastic_ranks import ThreadJob, backward, make_batches, make_model

ROUNDS, MICRO = 5, 3


def make_outer(kind, model, optimizer, ranks):
    average = optim.SGD(model.parameters(), lr=1.0)
    return DiLoCo(model, optimizer, ranks, average if kind == "local" else None)


def train(job, kind, victim, log):
    mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    me = current_world().rank
    with ElasticMesh(mesh, "dp", timeout=job.timeout) as elastic:
        model = make_model()
        optimizer = optim.Adam(model.parameters(), lr=0.05)
        outer = make_outer(kind, model, optimizer, elastic.mesh["dp"])
        state = {"model": model, "inner": optimizer, "outer": outer, "momentum": outer.optimizer}
        for step in elastic.steps(state, ROUNDS, batches=make_batches()):
            with step as current, outer.round(step):
                for number, samples in enumerate(step.share.microbatches(MICRO)):
                    if me == victim and step.number == 2 and number == 1:
                        job.kill()
                    backward(model, samples, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                ranks = current.mesh.ravel().tolist()
                step.on_commit(log.append, (me, step.number, ranks, step.share.samples.tolist()))
        return [p.data.copy() for p in model.parameters()]


def replay(kind, log, rank):
    """The expected state of ``rank``: each replica's round computed one after the other."""
    tried = {number: ranks for me, number, ranks, _ in log if me == rank}
    shares = {(me, number): samples for me, number, ranks, samples in log if tried[number] == ranks}
    models = {me: make_model() for me in tried[0]}
    inner = {me: optim.Adam(models[me].parameters(), lr=0.05) for me in models}
    kept = make_model()
    rates = {"lr": 1.0} if kind == "local" else {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    outer = optim.SGD(kept.parameters(), **rates)
    for number in range(ROUNDS):
        distances = []
        for me in tried[number]:
            for mine, start in zip(models[me].parameters(), kept.parameters(), strict=True):
                mine.data[...] = start.data
            samples = np.array(shares[me, number])
            for piece in np.array_split(samples, -(-len(samples) // MICRO)):
                backward(models[me], piece, 1.0)
                inner[me].step()
                inner[me].zero_grad()
            pairs = zip(kept.parameters(), models[me].parameters(), strict=True)
            distances.append([start.data - mine.data for start, mine in pairs])
        for parameter, *own in zip(kept.parameters(), *distances, strict=True):
            parameter.grad = np.mean(own, axis=0)
        outer.step()
        outer.zero_grad()
    return [parameter.data for parameter in kept.parameters()]


@pytest.mark.parametrize("kind", ["local", "diloco"])
@pytest.mark.parametrize("victim", [None, 1])
def test_rounds(kind, victim):
    log = []
    results = ThreadJob(lambda job: train(job, kind, victim, log), 3).join()
    assert sorted(results) == [me for me in range(3) if me != victim]
    for rank, parameters in results.items():
        assert [p.tobytes() for p in parameters] == [p.tobytes() for p in results[0]]
        for mine, expected in zip(parameters, replay(kind, log, rank), strict=True):
            np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-10)


def test_wrong_arguments():
    def program(job):
        model = make_model()
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(TypeError, match="model must be"):
            DiLoCo(None, optimizer, dist.group.WORLD)
        with pytest.raises(TypeError, match="optimizer must be"):
            DiLoCo(model, None, dist.group.WORLD)
        with pytest.raises(TypeError, match="ranks must be"):
            DiLoCo(model, optimizer, 3)

    ThreadJob(program, 1).join()
