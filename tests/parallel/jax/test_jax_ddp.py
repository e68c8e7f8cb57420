"""``DistributedDataParallel`` for pytrees: equal to one process, overlapped, in order."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import meshlib as dist
from meshlib._calls.future import Future
from meshlib._job.current import current_world
from meshlib.testing import run_ranks
from parallel import GradBucket
from parallel.jax import DistributedDataParallel

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from meshlib import jit as mj  # noqa: E402
from tests.support.parallel.slow_backward import LAYERS, layers, slow_backward  # noqa: E402

STEPS = 50
BATCH = 12
KIB = 1 / 1024  # in MiB

pytestmark = pytest.mark.usefixtures("double_precision")


class Head(NamedTuple):
    weight: Any
    bias: Any


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Block:
    """As equinox makes modules: arrays, a function and a number side by side."""

    weight: Any
    activation: Any
    calls: int

    def tree_flatten(self):
        return (self.weight, self.activation, self.calls), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def make_params(dtype="float64", seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return (rng.normal(size=shape) / 4).astype(dtype)

    return {
        "embed": {"w": draw(6, 16)},
        "blocks": [Block(draw(16, 16), jnp.tanh, 3), Block(draw(16, 16), jnp.sin, 4)],
        "head": Head(draw(16, 1), draw(1)),
        "scale": draw(),
    }


def apply(params, x):
    x = x @ params["embed"]["w"]
    for block in params["blocks"]:
        x = block.activation(x @ block.weight) * block.calls
    return (x @ params["head"].weight + params["head"].bias)[:, 0] * params["scale"]


def loss(params, x, y):
    return ((apply(params, x) - y) ** 2).mean()


def make_data(dtype="float64"):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(STEPS, BATCH, 6)).astype(dtype)
    return x, np.sin(x.sum(-1)).astype(dtype)


def descend(params, grads, lr=1e-3):
    return jax.tree.map(
        lambda p, g: p if g is None else p - lr * g,
        params,
        grads,
        is_leaf=lambda leaf: leaf is None,
    )


def arrays(tree):
    """Return the leaves that are arrays, and a function that puts a tree together from others."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

    def join(some):
        whole = list(leaves)
        for place, leaf in zip(places, some, strict=True):
            whole[place] = leaf
        return jax.tree_util.tree_unflatten(structure, whole)

    return [leaves[i] for i in places], join


def train(params, step, x, y):
    """Run all steps; ``step(params, x, y)`` returns gradients. Functions are no jit arguments."""
    leaves, join = arrays(params)

    @jax.jit
    def update(leaves, x, y):
        params = join(leaves)
        return arrays(descend(params, step(params, x, y)))[0]

    for i in range(len(x)):
        leaves = update(leaves, x[i], y[i])
    return [np.asarray(leaf) for leaf in leaves]


@functools.cache
def one_process(dtype):
    x, y = make_data(dtype)

    def gradients(params, x, y):
        leaves, join = arrays(params)
        grads = jax.grad(lambda leaves: loss(join(leaves), x, y))(leaves)
        return arrays_to_grads(params, grads)

    return train(make_params(dtype), gradients, x, y)


def arrays_to_grads(params, grads):
    """Return a tree with a gradient for each array and None for every other leaf."""
    leaves, structure = jax.tree_util.tree_flatten(params)
    remaining = iter(grads)
    return jax.tree_util.tree_unflatten(
        structure, [next(remaining) if hasattr(leaf, "dtype") else None for leaf in leaves]
    )


def plain(ddp):
    return lambda params, x, y: ddp.value_and_grad(loss)(params, x, y)[1]


def accumulating(ddp):
    def gradients(params, x, y):
        half = len(x) // 2
        with ddp.no_sync():
            _, first = ddp.value_and_grad(loss)(params, x[:half], y[:half])
        both = ddp.value_and_grad(loss, accumulated=first)(params, x[half:], y[half:])[1]
        return jax.tree.map(lambda grad: grad / 2, both)

    return gradients


def with_hook(ddp):
    def doubled(state, bucket: GradBucket) -> Future:
        bucket.set_buffer(bucket.buffer() * 2)
        work = ddp.process_group.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value() / (2 * state))

    ddp.register_comm_hook(ddp.process_group.size(), doubled)
    return plain(ddp)


def by_hand(ddp):
    def gradients(params, x, y):
        with ddp.no_sync():
            grads = ddp.value_and_grad(loss)(params, x, y)[1]
        return ddp.average(grads)

    return gradients


@pytest.mark.parametrize(
    ("make_step", "bucket_cap_mb"),
    [
        (plain, 25.0),
        (plain, KIB),  # several buckets; a large gradient has one of its own
        (plain, 1e-6),  # a bucket for each gradient
        (accumulating, KIB),
        (with_hook, KIB),
        (by_hand, KIB),
    ],
)
def test_equal_to_one_process_in_float64(make_step, bucket_cap_mb):
    expected = one_process("float64")

    def rank():
        me, size = dist.get_rank(), dist.get_world_size()
        x, y = make_data()
        ddp = DistributedDataParallel(make_params(seed=me), bucket_cap_mb=bucket_cap_mb)
        return train(ddp.params, make_step(ddp), x[:, me::size], y[:, me::size])

    for leaves in run_ranks(rank, 2):
        for leaf, other in zip(leaves, expected, strict=True):
            np.testing.assert_allclose(leaf, other, rtol=1e-12, atol=1e-12)


def test_equal_to_one_process_in_float32_on_three_ranks():
    expected = one_process("float32")

    def rank():
        me = dist.get_rank()
        x, y = make_data("float32")
        ddp = DistributedDataParallel(make_params("float32"), bucket_cap_mb=KIB)
        return train(ddp.params, plain(ddp), x[:, me::3], y[:, me::3])

    for leaves in run_ranks(rank, 3):
        for leaf, other in zip(leaves, expected, strict=True):
            assert leaf.dtype == np.float32
            np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-5)


def test_parameters_that_a_rank_does_not_use_count_as_zero():
    def rank():
        me = dist.get_rank()
        ddp = DistributedDataParallel(
            {"a": jnp.ones(300), "b": jnp.ones(300), "c": jnp.ones(300)}, bucket_cap_mb=KIB
        )

        def partial_loss(params, x):
            return (params["a"] * x if me == 0 else params["b"] * 10 * x).sum()

        step = jax.jit(lambda p: ddp.value_and_grad(partial_loss)(p, 2.0)[1])
        accumulated = jax.jit(
            lambda p, g: ddp.value_and_grad(partial_loss, accumulated=g)(p, 2.0)[1]
        )
        for _ in range(3):
            grads, more = step(ddp.params), accumulated(ddp.params, ddp.params)
        return grads, more

    for grads, more in run_ranks(rank, 2):
        for name, value in {"a": 1, "b": 10, "c": 0}.items():
            assert (grads[name] == value).all()
            assert (more[name] == value + 1).all()


def test_uneven_inputs_by_weight():
    """Ranks with fewer samples, or none, weigh their losses: the recipe of the documentation."""
    x, y = (a[0] for a in make_data())
    params = make_params()
    leaves, join = arrays(params)
    expected = jax.grad(lambda leaves: loss(join(leaves), x[:5], y[:5]))(leaves)

    def rank():
        me, size = dist.get_rank(), dist.get_world_size()
        mine, targets = (x[:4], y[:4]) if me == 0 else (x[4:8], y[4:8])
        valid = jnp.arange(4) < (4 if me == 0 else 1)
        ddp = DistributedDataParallel(make_params())

        def weighted(params):
            total = mj.all_reduce(valid.sum())
            errors = (apply(params, mine) - targets) ** 2
            return size * jnp.where(valid, errors, 0).sum() / total

        leaves, join = arrays(ddp.params)
        return arrays(
            jax.jit(lambda leaves: ddp.value_and_grad(weighted)(join(leaves))[1])(leaves)
        )[0]

    for grads in run_ranks(rank, 2):
        for grad, other in zip(grads, expected, strict=True):
            np.testing.assert_allclose(grad, other, rtol=1e-13, atol=1e-15)


def test_buckets_are_reduced_while_xla_still_computes():
    def rank():
        reduced = threading.Event()
        in_time = []
        ddp = DistributedDataParallel(LAYERS, bucket_cap_mb=KIB)

        def hook(group, bucket):
            work = group.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
            work.get_future().add_done_callback(lambda _: reduced.set())
            return work.get_future()

        def wait():
            # The second step is the first whose buckets are in the order of arrival.
            if len(in_time) < 2 or reduced.wait(60):
                in_time.append(True)

        ddp.register_comm_hook(ddp.process_group, hook)
        step = jax.jit(lambda params: ddp.value_and_grad(lambda p: layers(p, wait))(params)[1])
        for _ in range(3):
            reduced.clear()
            grads = jax.block_until_ready(step(ddp.params))
        expected = jax.grad(lambda p: layers(p, lambda: None))(ddp.params)
        jax.tree.map(np.testing.assert_allclose, grads, expected)
        return in_time, ddp.buckets, ddp.statistics

    for in_time, buckets, statistics in run_ranks(rank, 2):
        assert len(in_time) == 3
        assert buckets == [["['last']"], ["['middle']"], ["['first']"]]
        assert 0 <= statistics.hidden <= 1
        assert statistics.communication > 0


def test_the_program_keeps_few_gradients_at_a_time():
    """XLA uses a gradient's memory again, once the gradient is in its bucket."""
    layers, width = 16, 128

    def rank():
        params = [jnp.ones((width, width)) for _ in range(layers)]
        ddp = DistributedDataParallel(params, bucket_cap_mb=KIB)

        def loss(params):
            x = jnp.ones((1, width))
            for weight in params:
                x = jnp.tanh(x @ weight)
            return x.sum()

        def step(params):
            return descend(params, ddp.value_and_grad(loss)(params)[1])

        program = jax.jit(step, donate_argnums=0).lower(params).compile()
        return program.memory_analysis().temp_size_in_bytes / params[0].nbytes

    for gradients in run_ranks(rank, 2):
        assert gradients < 4


def test_buckets_go_off_in_the_same_order_though_gradients_come_in_another():
    def rank():
        me = dist.get_rank()
        names = ["a", "b", "c"]
        params = {name: jnp.full(200 + 10 * i, 1.0) for i, name in enumerate(names)}
        ddp = DistributedDataParallel(params, bucket_cap_mb=KIB)

        def loss(params):
            return sum(
                slow_backward(params[name] * i, partial(time.sleep, 0.03 * ((i + me) % 3))).sum()
                for i, name in enumerate(names)
            )

        step = jax.jit(lambda params: ddp.value_and_grad(loss)(params)[1])
        for _ in range(4):
            grads = step(params)
        records = current_world().recorder.records(ddp.process_group.id)
        return grads, [(r.kind, r.header.elements) for r in records]

    (first, calls), (second, others) = run_ranks(rank, 2)
    assert calls == others
    for grads in (first, second):
        for i, name in enumerate(grads):
            assert (grads[name] == i).all()


def test_two_wrappers_microbatches_in_a_scan_and_collectives_in_one_program():
    def rank():
        me = dist.get_rank()
        one = DistributedDataParallel({"w": jnp.ones(300)}, bucket_cap_mb=KIB)
        two = DistributedDataParallel({"w": jnp.ones(200)}, bucket_cap_mb=KIB)

        @jax.jit
        def program(a, b):
            def loss(params, x):
                return (mj.all_reduce(params["w"]) * x).sum()

            def inner(total, x):
                return total + one.value_and_grad(loss)(a, x)[1]["w"], None

            total, _ = jax.lax.scan(inner, jnp.zeros(300), jnp.arange(4.0) * (me + 1))
            _, grads = two.value_and_grad(loss)(b, 1.0 + me)
            return total, grads["w"]

        for _ in range(3):
            out = program(one.params, two.params)
        return out

    for total, grads in run_ranks(rank, 2):
        np.testing.assert_array_equal(total, 6.0 + 12.0)
        np.testing.assert_array_equal(grads, 3.0)


def test_auxiliary_output_a_group_of_one_and_use_outside_of_jit():
    def rank():
        def loss(params, x, *, offset):
            return (params["w"] * x).sum() + offset, {"x": x}

        results = []
        for group in (dist.group.WORLD, dist.new_group([dist.get_rank()])):
            ddp = DistributedDataParallel({"w": jnp.ones(300)}, group, bucket_cap_mb=KIB)
            for transform in (jax.jit, lambda f: f):
                step = transform(ddp.value_and_grad(loss, has_aux=True))
                for _ in range(2):
                    result = step(ddp.params, 1.0 + dist.get_rank(), offset=5.0)
                results.append(result)
        return results

    for me, results in enumerate(run_ranks(rank, 2)):
        x = 1.0 + me
        for ((value, aux), grads), expected in zip(results, [1.5, 1.5, x, x], strict=True):
            assert (value, aux["x"]) == (300 * x + 5, x)
            assert (grads["w"] == expected).all()


def test_rank_0s_values_are_taken_and_numpy_arrays_do():
    def rank():
        value = np.full(3, float(dist.get_rank()))
        ddp = DistributedDataParallel([value, jnp.asarray(value, "bfloat16"), "name"])
        return ddp.params

    for numbers, small, name in run_ranks(rank, 2):
        assert isinstance(numbers, jax.Array)
        assert small.dtype == jnp.bfloat16
        assert (numbers == 0).all()
        assert (small == 0).all()
        assert name == "name"
