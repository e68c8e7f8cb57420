"""Collectives inside ``jax.jit``: values, derivatives, and every transformation of JAX.

Each collective has an oracle: what it does to the members' arrays stacked along dim 0, in plain
``jax.numpy`` on one rank. Its derivatives are the collective's: the loss is the sum of all
members' losses.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import meshlib as dist
from meshlib._job.current import current_world
from meshlib.testing import RankError, run_ranks

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


def late(x, seconds):
    """Return ``x``, available to XLA only after a while."""

    def wait(x):
        time.sleep(seconds)
        return x

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_independent_calls_keep_their_order_whatever_xla_would_do_first():
    """Each rank has its other operand late: XLA, left alone, would begin at different calls."""

    def rank():
        me = dist.get_rank()

        @jax.jit
        def program(x):
            a = late(x, 0.05) if me == 0 else x
            b = x if me == 0 else late(x, 0.05)
            total = mj.all_reduce(a)
            largest = mj.all_reduce(b * 10, dist.ReduceOp.MAX)

            def step(carry, _):
                return mj.all_reduce(carry) / 2, mj.broadcast(b, 1)

            carry, copies = jax.lax.scan(step, x, None, length=3)
            parts = mj.all_gather(late(x, 0.02) if me else x)
            return total, largest, carry, copies, parts

        out = [program(jnp.full(3, 1.0 + me)) for _ in range(3)][-1]
        calls = [r.kind for r in current_world().recorder.records() if r.group.startswith("jit")]
        return [np.asarray(x)[..., 0] for x in out], calls

    (first, calls), (second, others) = run_ranks(rank, 2)
    once = ["all_reduce", "all_reduce", *["all_reduce", "broadcast"] * 3, "all_gather"]
    assert calls == others == once * 3
    for got in (first, second):
        expected = [3.0, 20.0, 1.5, [2.0] * 3, [1.0, 2.0]]
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_calls_on_several_groups_and_the_main_threads_own_calls_do_not_mix():
    def rank():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        me = dist.get_rank()

        @jax.jit
        def program(x):
            by_dp = mj.all_reduce(late(x, 0.02 * me), group=mesh["dp"])
            by_tp = mj.all_reduce(x, group=mesh["tp"])
            return mj.all_gather(by_dp * by_tp, mesh)

        total = np.zeros(1)
        for _ in range(4):
            out = program(jnp.full(1, 1.0 + me))
            total += mesh["dp"].all_reduce(np.ones(1)) + mesh.all_reduce(np.ones(1))
        return np.asarray(out).ravel(), total

    for out, total in run_ranks(rank, 4):
        np.testing.assert_array_equal(out, [4.0 * 3, 6.0 * 3, 4.0 * 7, 6.0 * 7])
        assert total == 4 * (2 + 4)


def test_control_flow():
    def rank():
        me = dist.get_rank()

        @jax.jit
        def program(x):
            def body(state):
                i, x = state
                return i + 1, mj.all_reduce(x) / 2

            _, x = jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))
            x = jax.lax.cond(x.sum() > 0, mj.all_reduce, lambda x: x, x)
            mj.barrier()
            return jax.jit(mj.all_gather)(x)

        return program(jnp.full(1, 1.0 + me))

    for out in run_ranks(rank, 2):
        np.testing.assert_array_equal(out, [[3.0], [3.0]])


def test_send_and_recv_with_derivatives():
    def rank():
        def loss(x):
            if dist.get_rank() == 0:
                x = mj.send(x, 1, tag=7)
                return (x * x).sum()
            y = mj.recv(x, 0, tag=7)
            return (3 * y).sum()

        return jax.jit(jax.value_and_grad(loss))(jnp.arange(1.0, 4.0) + 10 * dist.get_rank())

    (first, gradient), (second, other) = run_ranks(rank, 2)
    assert (first, second) == (14, 18)
    np.testing.assert_array_equal(gradient, 2 * np.arange(1.0, 4.0) + 3)
    np.testing.assert_array_equal(other, 0)


def in_a_scan(f):
    """Return ``f``, run by a ``lax.scan`` of one step."""
    return lambda x: jax.lax.scan(lambda carry, _: (carry, f(x)), 0, length=1)[1].sum()


@pytest.mark.parametrize(
    "around",
    [lambda f: f, jax.jit, jax.checkpoint, in_a_scan, lambda f: in_a_scan(jax.checkpoint(f))],
    ids=["plain", "jit", "checkpoint", "scan", "checkpoint in scan"],
)
def test_a_rank_whose_loss_ignores_the_result_still_takes_part_in_the_backward_pass(around):
    def rank():
        me = dist.get_rank()

        def loss(x):
            y = mj.all_reduce(x)
            return y.sum() if me == 0 else x.sum()

        return jax.jit(jax.grad(around(loss)))(jnp.ones(2))

    first, second = run_ranks(rank, 2)
    np.testing.assert_array_equal(first, 1)
    np.testing.assert_array_equal(second, 2)


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable"])
def test_checkpoint_keeps_the_result_of_a_call_and_does_not_repeat_it(policy):
    def rank():
        policies = jax.checkpoint_policies
        loss = jax.checkpoint(
            lambda x: jnp.sin(mj.all_reduce(jnp.sin(x))).sum(), policy=getattr(policies, policy)
        )
        gradient = jax.jit(jax.grad(loss))(jnp.ones(2))
        return gradient, [r.kind for r in current_world().recorder.records()]

    for gradient, calls in run_ranks(rank, 2):
        assert calls == ["all_reduce"] * 2  # one forward, one of the derivative
        np.testing.assert_allclose(gradient, 2 * np.cos(2 * np.sin(1)) * np.cos(1))


def test_ranks_that_compiled_different_calls_get_an_error_and_no_values():
    def rank():
        dtype = np.float32 if dist.get_rank() else np.float64
        with pytest.raises(jax.errors.JaxRuntimeError, match="CollectiveMismatchError"):
            jax.jit(mj.all_reduce)(jnp.ones(4, dtype)).block_until_ready()
        # The group is broken and says so; nothing hangs.
        with pytest.raises(jax.errors.JaxRuntimeError, match="CollectiveMismatchError"):
            jax.jit(mj.all_reduce)(jnp.ones(4)).block_until_ready()

    run_ranks(rank, 2)


def test_a_call_is_recorded_where_it_is_written():
    def written(x):
        return mj.all_reduce(2 * x).sum() + mj.all_gather(x).sum()

    def rank():
        jax.block_until_ready(jax.jit(jax.grad(written))(jnp.ones(2)))
        return [(record.kind, record.site) for record in current_world().recorder.records()]

    line = written.__code__.co_firstlineno + 1
    for sites in run_ranks(rank, 2):
        # A transposed call is made for the line of the one that it is the transpose of.
        assert {kind for kind, _ in sites} == {"all_reduce", "all_gather", "reduce_scatter"}
        assert {site for _, site in sites} == {f"{__file__}:{line} in written"}


BAD_ARGUMENTS = [
    (lambda x: mj.all_reduce(x, dist.ReduceOp.BAND), TypeError, "BAND"),
    (lambda x: mj.all_reduce(x.astype(int), dist.ReduceOp.AVG), TypeError, "round"),
    (lambda x: mj.all_reduce(x, "sum"), TypeError, "op must be a ReduceOp"),
    (lambda x: mj.all_reduce(x, group=3), TypeError, "group must be"),
    (lambda x: mj.broadcast(x, 5), ValueError, "src: global rank 5"),
    (mj.broadcast, ValueError, "exactly one of src and group_src"),
    (lambda x: mj.all_gather(x, axis=2), ValueError, "axis is 2; expected -2 to 1"),
    (lambda x: mj.all_gather(x, sizes=[3, 3]), ValueError, "goes with tiled=True only"),
    (lambda x: mj.all_gather(x, tiled=True, sizes=[3]), ValueError, "each of 2 members"),
    (lambda x: mj.all_gather(x, tiled=True, sizes=[1, 2]), ValueError, "as sizes [1, 2] say for"),
    (mj.reduce_scatter, ValueError, "shape (3,); expected 2 entries"),
    (lambda x: mj.reduce_scatter(x, tiled=True), ValueError, "dim 0 does not divide by the 2"),
    (lambda x: mj.permute(x, [(0, 2)]), ValueError, "destinations [2]"),
    (lambda x: mj.permute(x, [(0, 1), (0, 0)]), ValueError, "sources more than once"),
    (lambda x: mj.scan(x, dist.ReduceOp.AVG), ValueError, "one that a prefix has"),
    (lambda x: mj.all_reduce(x, transpose="none"), ValueError, "transpose is 'none'; expected"),
    (
        lambda x: mj.all_reduce(x, dist.ReduceOp.MAX, transpose="identity"),
        ValueError,
        "goes with ReduceOp.SUM only",
    ),
    (lambda x: mj.recv_anysource(x, tag=-1), ValueError, "tag is -1"),
    (lambda x: mj.send(x, 1, tag=-1), ValueError, "tag is -1"),
    (lambda x: mj.all_reduce(x.astype("int4")), TypeError, "cannot be communicated"),
]


def test_bad_arguments_are_refused_while_tracing():
    def rank():
        for call, error, message in BAD_ARGUMENTS:
            with pytest.raises(error, match=re.escape(message)):
                jax.jit(call)(jnp.ones(3))
        return mj.all_reduce(jnp.ones(1))

    for out in run_ranks(rank, 2):
        assert out == 2


def test_a_rank_outside_of_the_group_is_told_so():
    def rank():
        group = dist.new_group([0])
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="this rank is not a member"):
                jax.jit(lambda x: mj.all_reduce(x, group=group))(jnp.ones(3))

    run_ranks(rank, 2)


def test_an_exception_elsewhere_in_the_job_ends_a_program_that_waits():
    def rank():
        if dist.get_rank() == 1:
            raise KeyError("the cause")
        return jax.jit(mj.all_reduce)(jnp.ones(4)).block_until_ready()

    with pytest.raises(RankError, match="rank 1 of 2 raised KeyError: 'the cause'"):
        run_ranks(rank, 2)
