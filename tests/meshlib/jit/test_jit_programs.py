"""Calls in compiled programs: their order, control flow, checkpoints, and their records."""

from __future__ import annotations

import time

import numpy as np
import pytest

import meshlib as dist
from meshlib._job.current import current_world
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from meshlib import jit as mj  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")


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
