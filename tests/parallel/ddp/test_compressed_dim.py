"""Training over a mesh dim that compresses: without a hook, and with nothing lost on the way."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import DistributedDataParallel, nn, optim
from parallel.elastic import DiLoCo

N, STEPS = 2, 4
SHAPES = (160, 120), (120, 150)  # each more than what is sent as it is


def make_model():
    rng = np.random.default_rng(7)
    (a, b), (_, c) = SHAPES
    layers = (
        nn.Linear(a, b, bias=False, rng=rng, dtype="f4"),
        nn.Linear(b, c, bias=False, rng=rng, dtype="f4"),
    )
    return nn.Sequential(*layers)


def mesh_of(error_feedback):
    compress = {"dp": dist.Compression("int8", error_feedback=error_feedback)}
    return dist.init_device_mesh("cpu", (N,), mesh_dim_names=("dp",), compress=compress)


def backward(model, rank, step):
    rng = np.random.default_rng([rank, step])
    model(rng.standard_normal((8, SHAPES[0][0])).astype("f4"))
    model.backward(rng.standard_normal((8, SHAPES[1][1])).astype("f4"))


def exact_average(step):
    """The average gradients of a step, in one process."""
    total = [0.0, 0.0]
    for rank in range(N):
        model = make_model()
        backward(model, rank, step)
        total = [t + p.grad / N for t, p in zip(total, model.parameters(), strict=True)]
    return total


@pytest.mark.parametrize("view", [False, True])
def test_gradients_that_ddp_averages_are_late_and_never_lost(view):
    """Also across the first step, after which buckets are made anew."""

    def job():
        model = DistributedDataParallel(
            make_model(),
            mesh_of(True)["dp"],
            bucket_cap_mb=0.01,
            gradient_as_bucket_view=view,
        )
        sums, orders = [0.0, 0.0], []
        for step in range(STEPS):
            backward(model, dist.get_rank(), step)
            sums = [s + p.grad for s, p in zip(sums, model.parameters(), strict=True)]
            orders.append([path for bucket in model.buckets for path in bucket])
            for parameter in model.parameters():
                parameter.grad = None
        left = model._gradients.reducer.residuals()
        return sums, orders, [left[number].reshape(s.shape) for number, s in enumerate(sums)]

    results = run_ranks(job, N)
    assert all(len(orders[0]) == 2 for _, orders, _ in results)
    exact = [exact_average(step) for step in range(STEPS)]
    for number in range(2):
        first, second = (sums[number] for sums, _, _ in results)
        assert first.tobytes() == second.tobytes()
        total = sum(step[number] for step in exact)
        late = sum(left[number] for _, _, left in results) / N
        assert np.abs(first - total).max() > 1e-3
        np.testing.assert_allclose(first + late, total, atol=2e-4)


class Heads(nn.Module):
    """Two layers side by side, of which a pass uses some."""

    def __init__(self):
        super().__init__()
        self.heads = make_model()
        self.use = (0, 1)

    def forward(self, xs):
        return [self.heads.layers[i](x) for i, x in zip(self.use, xs, strict=True)]

    def backward(self, grads):
        for i, grad in zip(self.use[::-1], grads[::-1], strict=True):
            self.heads.layers[i].backward(grad)


def test_what_is_kept_stays_with_a_parameter_that_no_rank_uses():
    """Its average, with which it would go, is dropped."""

    def job():
        model = DistributedDataParallel(
            Heads(),
            mesh_of(True)["dp"],
            find_unused_parameters=True,
            bucket_cap_mb=0.01,
        )
        kept = []
        for step, use in enumerate([(0, 1), (0,), (0, 1)]):
            model.module.use = use
            rng = np.random.default_rng([dist.get_rank(), step])
            shapes = [SHAPES[i] for i in use]
            model([rng.standard_normal((8, a)).astype("f4") for a, _ in shapes])
            model.backward([rng.standard_normal((8, b)).astype("f4") for _, b in shapes])
            parameters = list(model.parameters())
            assert [p.grad is not None for p in parameters] == [True, 1 in use]
            kept.append(
                {n: part.copy() for n, part in model._gradients.reducer.residuals().items()}
            )
            model.zero_grad()
        return kept

    for kept in run_ranks(job, N):
        assert kept[0][1].any()
        np.testing.assert_array_equal(kept[1][1], kept[0][1])
        assert not np.array_equal(kept[1][0], kept[0][0])
        assert not np.array_equal(kept[2][1], kept[1][1])


def test_a_step_that_is_no_number_spoils_none_after_it():
    def job():
        model = DistributedDataParallel(make_model(), mesh_of(True)["dp"])
        grads = []
        for step in range(3):
            rng = np.random.default_rng([dist.get_rank(), step])
            model(rng.standard_normal((8, SHAPES[0][0])).astype("f4"))
            grad = rng.standard_normal((8, SHAPES[1][1])).astype("f4")
            if (dist.get_rank(), step) == (0, 1):
                grad[3, 5] = np.inf
            with np.errstate(invalid="ignore"):
                model.backward(grad)
            grads.append([parameter.grad for parameter in model.parameters()])
            for parameter in model.parameters():
                parameter.grad = None
        return [[bool(np.isfinite(grad).all()) for grad in each] for each in grads]

    for finite in run_ranks(job, N):
        assert finite == [[True, True], [False, False], [True, True]]


def test_without_error_feedback_nothing_is_kept():
    def job():
        model = DistributedDataParallel(make_model(), mesh_of(False)["dp"])
        backward(model, dist.get_rank(), 0)
        assert not model._gradients.reducer.residuals()
        return [parameter.grad for parameter in model.parameters()]

    for grads in run_ranks(job, N):
        for grad, exact in zip(grads, exact_average(0), strict=True):
            assert not np.array_equal(grad, exact)
            np.testing.assert_allclose(grad, exact, atol=np.abs(exact).max() / 60)


class Step:
    """A step of an elastic loop that is committed, or is not."""

    def __init__(self):
        self.told = []

    def on_commit(self, function, *arguments):
        self.told.append((function, arguments))

    def commit(self):
        for function, arguments in self.told:
            function(*arguments)


def test_what_a_round_rounded_away_comes_with_the_next_that_counts():
    def job():
        model = make_model()
        inner = optim.SGD(model.parameters(), lr=0.1)
        # The outer step adds the average distance as it is.
        average = optim.SGD(model.parameters(), lr=1.0)
        outer = DiLoCo(model, inner, mesh_of(True)["dp"], average)
        begun = [p.data.copy() for p in model.parameters()]
        wanted = [np.zeros_like(b) for b in begun]
        for number, counts in enumerate([True, False, True, True]):
            step, before = Step(), [p.data.copy() for p in model.parameters()]
            with outer.round(step):
                backward(model, dist.get_rank(), number)
                inner.step()
                inner.zero_grad()
                moved = [p.data - b for p, b in zip(model.parameters(), before, strict=True)]
            if counts:
                step.commit()
                wanted = [w + m for w, m in zip(wanted, moved, strict=True)]
        went = [p.data - b for p, b in zip(model.parameters(), begun, strict=True)]
        return went, wanted, [-residual for residual in outer._residuals]

    results = run_ranks(job, N)
    for number in range(2):
        went = [result[0][number] for result in results]
        assert went[0].tobytes() == went[1].tobytes()
        average = sum(result[1][number] for result in results) / N
        late = sum(result[2][number] for result in results) / N
        assert np.abs(went[0] - average).max() > 1e-4
        np.testing.assert_allclose(went[0] + late, average, atol=5e-5)
