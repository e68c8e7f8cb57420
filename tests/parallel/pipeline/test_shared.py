"""Parameters that the first and the last stage share are one parameter to training."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import fully_shard, nn, optim
from parallel.pipeline import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from tests.support.parallel.pipeline_training import ddp, make_mesh

WORDS, WIDTH = 6, 5


class Output(nn.Module):
    """Logits by the embedding's own vectors."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        self.save_for_backward(x)
        return x @ self.weight.data.T

    def backward(self, grad):
        x = self.saved()
        self.defer(lambda: self.weight.accumulate_grad(grad.T @ x))
        return grad @ self.weight.data


def make_layers(seed=0):
    rng = np.random.default_rng(seed)
    embedding = nn.Embedding(WORDS, WIDTH, rng=rng, dtype="f8")
    middle = [nn.Linear(WIDTH, WIDTH, rng=rng, dtype="f8"), nn.Tanh()]
    return embedding, *middle, Output(embedding.weight)


def batch(step):
    rng = np.random.default_rng(step)
    return rng.integers(0, WORDS, 8), rng.integers(0, WORDS, 8)


def train_whole():
    model = nn.Sequential(*make_layers())
    optimizer, loss = optim.AdamW(model.parameters(), lr=0.01), nn.CrossEntropyLoss()
    for step in range(20):
        x, y = batch(step)
        optimizer.zero_grad()
        for half in (slice(4), slice(4, 8)):  # two steps of the pipeline to one of the optimizer
            loss(model(x[half]), y[half])
            model.backward(loss.backward())
        optimizer.step()
    return model[0].weight.data


def split_dp(module, mesh):
    return fully_shard(module, mesh["dp"])


@pytest.mark.parametrize("wrap", [None, ddp, split_dp])
@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleZBVZeroBubble])
def test_tied_embedding_equals_one_process(kind, wrap):
    def job():
        mesh = make_mesh(2, 1 if wrap is None else 2)
        rank = mesh["pp"].get_local_rank()
        # Only the first stage's values count; other seeds would show if they did not.
        embedding, linear, tanh, _ = make_layers()
        output = Output(make_layers(1)[0].weight)
        if kind is Schedule1F1B:
            parts = {0: [embedding, linear], 1: [tanh, output]}
        else:
            parts = {0: [embedding], 1: [linear], 2: [tanh], 3: [output]}
        own = [rank] if kind is Schedule1F1B else [rank, 3 - rank]
        modules, stages = [], []
        for index in own:
            module = nn.Sequential(*parts[index])
            modules.append(module)
            has_any = any(True for _ in module.parameters())
            wrapped = wrap(module, mesh) if wrap and has_any else module
            last = len(parts) - 1
            path = {0: "0.weight", last: f"{len(parts[last]) - 1}.weight"}.get(index)
            if path and wrap is ddp:
                path = f"module.{path}"
            shared = {"embedding": path} if path else None
            stages.append(PipelineStage(wrapped, index, len(parts), mesh["pp"], shared=shared))
        schedule = kind(stages, 2, nn.CrossEntropyLoss())
        optimizers = [
            optim.AdamW(m.parameters(), lr=0.01)
            for m in modules
            if any(True for _ in m.parameters())
        ]
        replica = mesh.get_local_rank("dp") if wrap else 0
        replicas = 2 if wrap else 1
        for step in range(20):
            x, y = batch(step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            for half in (slice(4), slice(4, 8)):
                schedule.step(x[half][replica::replicas], target=y[half][replica::replicas])
            for optimizer in optimizers:
                optimizer.step()
        tables = [
            p.value.full_array() if hasattr(p.value, "full_array") else p.value
            for stage in stages
            for p in stage.shared_parameters.values()
        ]
        return [table.copy() for table in tables]

    expected = train_whole()
    results = run_ranks(job, 2 if wrap is None else 4)
    tables = [table for result in results for table in result]
    assert len(tables) == (2 if wrap is None else 4)
    for table in tables:
        np.testing.assert_allclose(table, expected, rtol=0, atol=1e-9)
        np.testing.assert_array_equal(table, tables[0])


def test_one_object_on_one_rank_needs_no_message():
    def job():
        embedding, linear, tanh, output = make_layers()
        parts = [[embedding], [linear], [tanh], [output]]
        own = [dist.get_rank(), 3 - dist.get_rank()]
        stages = [
            PipelineStage(
                nn.Sequential(*parts[i]), i, 4, shared={"e": "0.weight"} if i in (0, 3) else None
            )
            for i in own
        ]
        schedule = ScheduleZBVZeroBubble(stages, 2, nn.CrossEntropyLoss())
        x, y = batch(0)
        schedule.step(x, target=y)
        return embedding.weight.grad

    model, loss = nn.Sequential(*make_layers()), nn.CrossEntropyLoss()
    x, y = batch(0)
    loss(model(x), y)
    model.backward(loss.backward())
    np.testing.assert_allclose(run_ranks(job, 2)[0], model[0].weight.grad, atol=1e-14)
