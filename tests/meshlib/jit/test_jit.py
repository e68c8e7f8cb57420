"""Collectives inside ``jax.jit``: values, derivatives, and every transformation of JAX.

Each collective has an oracle: what it does to the members' arrays stacked along dim 0, in plain
``jax.numpy`` on one rank. Its derivatives are the collective's: the loss is the sum of all
members' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import meshlib as dist
from meshlib._job.current import current_world
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from meshlib import jit as mj  # noqa: E402

SIZE = 3
PAIRS = [(0, 2), (2, 1)]
UNEVEN = (2, 0, 3)

pytestmark = pytest.mark.usefixtures("double_precision")


class Case(NamedTuple):
    call: Callable[[Any], Any]
    oracle: Callable[[Any], Any]  # on (SIZE, …), the members along dim 0
    shape: tuple[int, ...]


def everywhere(one):
    return jnp.broadcast_to(one, (SIZE, *one.shape))


def only_at(root, whole):
    return jnp.zeros((SIZE, *whole.shape), whole.dtype).at[root].set(whole)


def permuted(x):
    out = jnp.zeros_like(x)
    for source, destination in PAIRS:
        out = out.at[destination].set(x[source])
    return out


CASES = {
    "all_reduce": Case(mj.all_reduce, lambda x: everywhere(x.sum(0)), (4,)),
    "all_reduce_avg": Case(
        lambda x: mj.all_reduce(x, dist.ReduceOp.AVG), lambda x: everywhere(x.mean(0)), (2, 2)
    ),
    "all_reduce_max": Case(
        lambda x: mj.all_reduce(x, dist.ReduceOp.MAX), lambda x: everywhere(x.max(0)), (4,)
    ),
    "all_reduce_min": Case(
        lambda x: mj.all_reduce(x, dist.ReduceOp.MIN), lambda x: everywhere(x.min(0)), ()
    ),
    "all_reduce_product": Case(
        lambda x: mj.all_reduce(x, dist.ReduceOp.PRODUCT), lambda x: everywhere(x.prod(0)), (4,)
    ),
    "all_reduce_premul": Case(
        lambda x: mj.all_reduce(x, dist.premul_sum(0.5)),
        lambda x: everywhere(0.5 * x.sum(0)),
        (2, 2),
    ),
    "broadcast": Case(lambda x: mj.broadcast(x, 1), lambda x: everywhere(x[1]), (4,)),
    "reduce": Case(lambda x: mj.reduce(x, 2), lambda x: only_at(2, x.sum(0)), (4,)),
    "reduce_avg": Case(
        lambda x: mj.reduce(x, 1, dist.ReduceOp.AVG), lambda x: only_at(1, x.mean(0)), (4,)
    ),
    "reduce_max": Case(
        lambda x: mj.reduce(x, 2, dist.ReduceOp.MAX), lambda x: only_at(2, x.max(0)), (2, 2)
    ),
    "reduce_product": Case(
        lambda x: mj.reduce(x, 0, dist.ReduceOp.PRODUCT), lambda x: only_at(0, x.prod(0)), (4,)
    ),
    "reduce_premul": Case(
        lambda x: mj.reduce(x, 1, dist.premul_sum(0.5)), lambda x: only_at(1, 0.5 * x.sum(0)), (4,)
    ),
    "all_gather": Case(mj.all_gather, everywhere, (2, 2)),
    "all_gather_last": Case(
        lambda x: mj.all_gather(x, axis=-1), lambda x: everywhere(jnp.moveaxis(x, 0, -1)), (2, 4)
    ),
    "all_gather_tiled": Case(
        lambda x: mj.all_gather(x, axis=1, tiled=True),
        lambda x: everywhere(jnp.concatenate(list(x), axis=1)),
        (2, 4),
    ),
    "all_gather_uneven": Case(
        lambda x: mj.all_gather(x[: UNEVEN[dist.get_rank()]], tiled=True, sizes=UNEVEN),
        lambda x: everywhere(jnp.concatenate([x[i, :n] for i, n in enumerate(UNEVEN)])),
        (3, 2),
    ),
    "all_gather_uneven_last": Case(
        lambda x: mj.all_gather(
            x[:, 1 : 1 + dist.get_rank()], axis=-1, tiled=True, sizes=[0, 1, 2]
        ),
        lambda x: everywhere(jnp.concatenate([x[1, :, 1:2], x[2, :, 1:3]], axis=-1)),
        (2, 3),
    ),
    "reduce_scatter": Case(mj.reduce_scatter, lambda x: x.sum(0), (SIZE, 2)),
    "reduce_scatter_avg_tiled": Case(
        lambda x: mj.reduce_scatter(x, dist.ReduceOp.AVG, axis=1, tiled=True),
        lambda x: jnp.stack(jnp.split(x.mean(0), SIZE, axis=1)),
        (2, 2 * SIZE),
    ),
    "reduce_scatter_max": Case(
        lambda x: mj.reduce_scatter(x, dist.ReduceOp.MAX), lambda x: x.max(0), (SIZE, 2)
    ),
    "all_to_all": Case(mj.all_to_all, lambda x: jnp.swapaxes(x, 0, 1), (SIZE, 2)),
    "all_to_all_tiled": Case(
        lambda x: mj.all_to_all(x, split_axis=1, concat_axis=0, tiled=True),
        lambda x: jnp.stack(
            [jnp.concatenate(list(jnp.split(x, SIZE, axis=2)[i])) for i in range(SIZE)]
        ),
        (2, 2 * SIZE),
    ),
    "gather": Case(lambda x: mj.gather(x, 1), lambda x: only_at(1, x), (4,)),
    "scatter": Case(lambda x: mj.scatter(x, 1), lambda x: x[1], (SIZE, 2)),
    "permute": Case(lambda x: mj.permute(x, PAIRS), permuted, (4,)),
    "scan": Case(mj.scan, lambda x: jnp.cumsum(x, axis=0), (2, 2)),
    "scan_scalar_product": Case(
        lambda x: mj.scan(x, dist.ReduceOp.PRODUCT), lambda x: jnp.cumprod(x, axis=0), ()
    ),
    "scan_max": Case(
        lambda x: mj.scan(x, dist.ReduceOp.MAX), lambda x: jax.lax.cummax(x, axis=0), (5,)
    ),
    "scan_premul": Case(
        lambda x: mj.scan(x, dist.premul_sum(0.5)), lambda x: 0.5 * jnp.cumsum(x, axis=0), (0, 2)
    ),
}


def values(*shape, seed=0):
    """Different numbers, no two of them equal, none of them near zero."""
    count = int(np.prod(shape))
    return (np.random.default_rng(seed).permutation(count) + 1.0).reshape(shape) / count + 0.5


@pytest.mark.parametrize("name", CASES)
def test_values_derivatives_and_batches(name):
    call, oracle, shape = CASES[name]
    x, t = values(2, SIZE, *shape), values(2, SIZE, *shape, seed=1)  # batches of two
    c = values(*jax.eval_shape(jax.vmap(oracle), x).shape, seed=2)

    def check(f, x, t, c):
        value, tangent = jax.jvp(f, (x,), (t,))
        return value, tangent, jax.vjp(f, x)[1](c)[0]

    def rank():
        me = dist.get_rank()
        mine = x[:, me], t[:, me], c[:, me]
        last = [np.moveaxis(a, 0, -1) for a in mine]

        def everything(mine, last):
            batched_last = jax.vmap(call, in_axes=-1, out_axes=-1)
            one = check(call, *(a[0] for a in mine))
            return one, check(jax.vmap(call), *mine), check(batched_last, *last)

        return jax.jit(everything)(mine, last)

    whole = [np.asarray(a) for a in jax.jit(lambda *a: check(jax.vmap(oracle), *a))(x, t, c)]
    for me, (one, batched, batched_last) in enumerate(run_ranks(rank, SIZE)):
        for i in range(3):
            np.testing.assert_allclose(one[i], whole[i][0][me], rtol=1e-13)
            np.testing.assert_allclose(batched[i], whole[i][:, me], rtol=1e-13)
            got = np.moveaxis(np.asarray(batched_last[i]), -1, 0)
            np.testing.assert_allclose(got, whole[i][:, me], rtol=1e-13)


LINEAR_AND_NOT = ("all_reduce", "all_reduce_max", "reduce_scatter", "all_to_all", "permute")


@pytest.mark.parametrize("name", LINEAR_AND_NOT)
def test_gradient_of_a_vmapped_checkpointed_scan(name):
    call, oracle, shape = CASES[name]
    x = values(2, SIZE, *shape)

    def loss(out):
        return (jnp.sin(out) * jnp.arange(1, out.size + 1).reshape(out.shape)).sum()

    def run(collective, losses):
        def total(x):
            def step(carry, _):
                out = jax.checkpoint(lambda a: collective(jnp.sin(a)))(carry)
                return carry * carry, losses(out)

            return jax.lax.scan(step, x, None, length=3)[1].sum()

        return jax.vmap(jax.grad(total))

    expected = np.asarray(
        jax.jit(run(oracle, lambda out: sum(loss(out[i]) for i in range(SIZE))))(x)
    )
    results = run_ranks(lambda: jax.jit(run(call, loss))(x[:, dist.get_rank()]), SIZE)
    for me, got in enumerate(results):
        np.testing.assert_allclose(got, expected[:, me], rtol=1e-12, atol=1e-15)


def test_outside_of_jit_and_in_a_group_of_one():
    def rank():
        me = dist.get_rank()
        alone = dist.new_group([me])
        x = jnp.arange(2.0)
        return (
            mj.all_reduce(x + me),
            mj.all_reduce(x, group=alone),
            mj.all_gather(x, alone),
            mj.reduce_scatter(x[None], group=alone),
            mj.permute(x, [], alone),
        )

    for whole, *alone in run_ranks(rank, 2):
        np.testing.assert_array_equal(whole, [1.0, 3.0])
        for got, expected in zip(alone, ([0, 1], [[0, 1]], [0, 1], [0, 0]), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_a_tree_is_reduced_in_one_call_for_each_dtype():
    def rank():
        me = dist.get_rank()
        tree = {
            "a": jnp.full((2, 3), 1.0 + me),
            "b": [jnp.float64(me), jnp.arange(3) * me, jnp.zeros((0, 2))],
        }
        total = jax.jit(mj.all_reduce)(tree)
        calls = [r.kind for r in current_world().recorder.records()]
        alone = mj.all_reduce(tree, group=dist.new_group([me]))
        grads = jax.grad(lambda x: sum(t.sum() for t in mj.all_reduce([x, 2 * x])))(jnp.ones(2))
        return jax.tree.map(np.asarray, (total, alone, tree, grads)), calls

    for (total, alone, tree, grads), calls in run_ranks(rank, 2):
        assert calls == ["all_reduce"] * 2
        np.testing.assert_array_equal(total["a"], np.full((2, 3), 3.0))
        scalar, whole, empty = total["b"]
        assert (scalar.tolist(), whole.tolist(), empty.shape) == (1.0, [0, 1, 2], (0, 2))
        assert whole.dtype == tree["b"][1].dtype
        np.testing.assert_array_equal(alone["a"], tree["a"])
        np.testing.assert_array_equal(grads, [6.0, 6.0])  # two ranks, of 1 + 2


def test_trees_go_together_by_the_other_calls_of_one_shape_too():
    calls = {
        "broadcast": lambda x: mj.broadcast(x, 1),
        "reduce": lambda x: mj.reduce(x, 0, dist.ReduceOp.MAX),
        "permute": lambda x: mj.permute(x, [(1, 0)]),
    }

    def rank():
        me = dist.get_rank()
        tree = {"a": jnp.full((2, 2), 1.0 + me), "b": (jnp.arange(3.0) * me, jnp.int32(7 - me))}
        together = jax.jit(lambda x: [call(x) for call in calls.values()])(tree)
        made = [r.kind for r in current_world().recorder.records()]
        return together, [jax.tree.map(call, tree) for call in calls.values()], made

    for together, apart, made in run_ranks(rank, 2):
        assert made == [kind for kind in ("broadcast", "reduce", "all_to_all") for _ in range(2)]
        for whole, leaves in zip(together, apart, strict=True):
            jax.tree.map(np.testing.assert_array_equal, whole, leaves)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "uint8", "bool", "complex64"])
def test_dtypes(dtype):
    def rank():
        op = dist.ReduceOp.BOR if dtype == "bool" else dist.ReduceOp.SUM
        return jax.jit(lambda x: mj.all_reduce(x, op))(jnp.ones((3, 0, 2), dtype)), jax.jit(
            lambda x: mj.all_reduce(x, op)
        )(jnp.ones(5, dtype))

    for empty, full in run_ranks(rank, 2):
        assert empty.shape == (3, 0, 2)
        assert full.dtype == dtype
        assert (full == (1 if dtype == "bool" else 2)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
def test_a_prefix_is_combined_in_the_tree_of_its_ranks_and_small_floats_are_rounded_once(dtype):
    """The order matters to each of these sums, and so does rounding in between."""
    size = 4

    def tree(rows):
        half = 1 << (len(rows) - 1).bit_length() - 1 if len(rows) > 1 else 0
        return tree(rows[:half]) + tree(rows[half:]) if half else rows[0]

    x = np.random.default_rng(0).normal(size=(size, 7)) * 10.0 ** np.arange(size)[:, None] % 99
    x = np.asarray(jnp.asarray(x).astype(dtype))
    wide = x.astype(np.float32) if dtype != "int8" else x
    expected = np.stack([tree(wide[:count]) for count in range(1, size + 1)]).astype(x.dtype)
    got = run_ranks(lambda: jax.jit(mj.scan)(x[dist.get_rank()]), size)
    np.testing.assert_array_equal(np.stack([np.asarray(row) for row in got]), expected)


def test_a_prefix_of_which_the_members_disagree_about_the_op_is_an_error():
    def rank():
        op = dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM
        with pytest.raises(jax.errors.JaxRuntimeError, match="CollectiveMismatchError"):
            jax.jit(lambda x: mj.scan(x, op))(jnp.ones(4)).block_until_ready()

    run_ranks(rank, 2)


def test_an_all_reduce_of_one_loss_is_transposed_without_a_call():
    """Where all members compute the same loss, each has the gradient of that loss."""

    def loss(x):
        return jnp.sin(mj.all_reduce({"a": x * x}, transpose="identity")["a"]).sum()

    def rank():
        x = jnp.arange(1.0, 4.0) + dist.get_rank()
        gradient = jax.jit(jax.grad(loss))(x)
        calls = [r.kind for r in current_world().recorder.records()]
        _, tangent = jax.jvp(loss, (x,), (jnp.ones(3),))
        second = jax.jit(jax.jvp, static_argnums=0)(jax.grad(loss), (x,), (jnp.ones(3),))[1]

        def once(y):
            return jax.linear_transpose(lambda x: mj.all_reduce(x, transpose="identity"), x)(y)[0]

        batches = jax.vmap(jax.grad(loss))(jnp.stack([x, 2 * x]))[0]
        twice = jax.linear_transpose(once, x)(x)[0]
        return gradient, calls, tangent, second, once(x), twice, batches

    x = np.arange(1.0, 4.0) + np.arange(2)[:, None]
    total, slope = (x * x).sum(0), (2 * x).sum(0)
    for me, results in enumerate(run_ranks(rank, 2)):
        gradient, calls, tangent, second, same, summed, batches = results
        assert calls == ["all_reduce"]
        np.testing.assert_allclose(gradient, np.cos(total) * 2 * x[me], rtol=1e-12)
        np.testing.assert_allclose(batches, gradient, rtol=1e-12)
        np.testing.assert_allclose(tangent, (np.cos(total) * slope).sum(), rtol=1e-12)
        expected = 2 * np.cos(total) - np.sin(total) * slope * 2 * x[me]
        np.testing.assert_allclose(second, expected, rtol=1e-12)
        np.testing.assert_array_equal(same, x[me])
        np.testing.assert_array_equal(summed, x.sum(0))
