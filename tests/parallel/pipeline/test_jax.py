"""Stages of JAX functions: every kind of schedule trains as one program does."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel.pipeline import ActionKind, get_schedule_class

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from parallel.jax import DistributedDataParallel, PipelineStage  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")


def make_params(seed=0):
    """Return parameters of four stages; there is a number that is not trained in each."""
    rng = np.random.default_rng(seed)
    sizes = [6, 9, 9, 8, 4]
    return [
        {"w": jnp.asarray(rng.normal(size=(n, m)) / n), "b": jnp.zeros(m), "name": "tanh", "n": 2}
        for n, m in pairwise(sizes)
    ]


def layer(params, x, ids, scale=1.0):
    """Pass on integers beside the activations."""
    assert params["name"] == "tanh"
    return jnp.tanh(x @ params["w"] + params["b"]) * params["n"] * scale + ids[:, None] * 0.1, ids


def last(params, x, ids):
    return layer(params, x, ids)[0]


def loss_function(output, target):
    picked = jnp.take_along_axis(jax.nn.log_softmax(output), target[:, None], axis=-1)
    return -picked.mean()


def batch(step):
    rng = np.random.default_rng(step)
    return rng.normal(size=(16, 6)), rng.integers(0, 3, 16), rng.integers(0, 4, 16)


def update(params, grads):
    return jax.tree.map(
        lambda p, g: p if g is None else p - 0.1 * g, params, grads, is_leaf=lambda x: x is None
    )


def trained(params):
    return [{key: np.asarray(one[key]) for key in "wb"} for one in params]


@cache
def train_whole():
    weights = [{key: one[key] for key in "wb"} for one in make_params()]

    @jax.jit
    def gradients(weights, x, ids, y):
        def loss(weights):
            carried = x, ids
            for one in weights:
                carried = layer({**one, "name": "tanh", "n": 2}, *carried)
            return loss_function(carried[0], y)

        return jax.value_and_grad(loss)(weights)

    losses = []
    for step in range(20):
        loss, grads = gradients(weights, *batch(step))
        losses.append(float(loss))
        weights = jax.tree.map(lambda p, g: p - 0.1 * g, weights, grads)
    return losses, trained(weights)


@pytest.mark.parametrize(
    ("name", "ranks", "dp"),
    [("1F1B", 2, 2), ("InterleavedZeroBubble", 2, 1), ("ZBVZeroBubble", 2, 1)],
)
def test_every_kind_of_schedule_equals_one_program(name, ranks, dp):

    def job():
        mesh = dist.init_device_mesh("cpu", (ranks, dp), mesh_dim_names=("pp", "dp"))
        rank, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        own = {
            "1F1B": None,  # two layers a stage
            "InterleavedZeroBubble": [rank, rank + 2],
            "ZBVZeroBubble": [rank, 3 - rank],
        }[name]
        params = make_params()
        if own is None:
            first = 2 * rank

            def two(both, x, ids):
                return (last if first else layer)(both[1], *layer(both[0], x, ids))

            stages = [PipelineStage(two, params[first : first + 2], rank, 2, mesh["pp"])]
        else:
            stages = [
                PipelineStage(last if i == 3 else layer, params[i], i, 4, mesh["pp"]) for i in own
            ]
        schedule = get_schedule_class(name)(stages, 4, loss_function)
        replicas = [DistributedDataParallel(stage.params, mesh["dp"]) for stage in stages]
        averages = [jax.jit(ddp.average) for ddp in replicas]
        losses = []
        for step in range(20):
            x, ids, y = (one[replica::dp] for one in batch(step))
            for stage in stages:
                stage.zero_grad()
            of_step = []
            schedule.step(x, ids, target=y, losses=of_step)
            losses += [np.mean(of_step)] if of_step else []
            for stage, average in zip(stages, averages, strict=True):
                stage.params = update(stage.params, average(stage.grads))
        if own is None:
            return losses, dict(zip((first, first + 1), trained(stages[0].params), strict=True))
        return losses, dict(zip(own, trained([s.params for s in stages]), strict=True))

    losses, expected = train_whole()
    results = run_ranks(job, ranks * dp, timeout=120)
    found = {}
    for _, parts in results:
        for number, params in parts.items():
            found[number] = params
            for key, value in params.items():
                np.testing.assert_allclose(value, expected[number][key], rtol=0, atol=1e-9)
    assert sorted(found) == [0, 1, 2, 3]
    of_last = [own for own, _ in results if own]
    np.testing.assert_allclose(np.mean(of_last, axis=0), losses, rtol=0, atol=1e-9)


def test_eval_outputs_and_sums_of_steps():
    x, ids, y = batch(0)

    def job():
        rank = dist.get_rank()
        params = make_params()[2 * rank]
        params["w"] = params["w"][:, :8]
        first = {"w": jnp.ones((6, 8)) / 6, "b": jnp.zeros(8), "name": "tanh", "n": 2}
        stage = PipelineStage([layer, last][rank], [first, make_params()[3]][rank], rank, 2)
        schedule = get_schedule_class("1F1B")(stage, 4, loss_function)
        losses = []
        output = schedule.eval(x, ids, target=y, losses=losses)
        assert stage.grads is None
        assert {s.action.kind for s in schedule.timeline().spans} == {ActionKind.FORWARD}
        again = schedule.step(x, ids, target=y)
        once = stage.grads
        schedule.step(x, ids, target=y)
        np.testing.assert_allclose(stage.grads["w"], 2 * once["w"], atol=1e-14)
        assert once["name"] is once["n"] is None
        return (output, again, losses) if rank else first

    first, (output, again, losses) = run_ranks(job, 2)
    expected = last(make_params()[3], *layer(first, x, ids))
    np.testing.assert_allclose(output, expected, atol=1e-14)
    np.testing.assert_allclose(again, expected, atol=1e-14)
    assert np.mean(losses) == pytest.approx(float(loss_function(expected, y)))


def test_wrong_arguments():
    def job():
        with pytest.raises(TypeError, match="function must be callable"):
            PipelineStage(3, {}, 0, 1)
        stage = PipelineStage(layer, make_params()[0], 0, 1)
        with pytest.raises(TypeError, match="loss_fn must be callable"):
            get_schedule_class("GPipe")(stage, 1, 3)
        schedule = get_schedule_class("GPipe")(stage, 1)
        stage.params = {"w": jnp.ones(3)}
        with pytest.raises(ValueError, match="params differs from the parameters at construction"):
            schedule.step(np.ones((2, 6)), np.ones(2, int))

    run_ranks(job, 1)
