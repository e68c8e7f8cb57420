"""``DistributedDataParallel.value_and_grad`` under JAX's transformations: refused, and no harm."""

from __future__ import annotations

import re

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel.jax import DistributedDataParallel

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

WHAT = "DistributedDataParallel.value_and_grad"

pytestmark = pytest.mark.usefixtures("double_precision")


def loss(params, scale=1.0):
    return (params["w"] ** 2).sum() * scale


def twice(params):
    return {"w": jnp.stack([params["w"]] * 2)}


def of_gradients(ddp):
    return lambda params: ddp.value_and_grad(loss)(params)[1]["w"].sum()


def of_value(ddp):
    return lambda params: ddp.value_and_grad(loss)(params)[0]


DERIVATIVES = {
    "grad of the loss": lambda ddp: jax.grad(of_value(ddp))(ddp.params),
    "grad of gradients": lambda ddp: jax.grad(of_gradients(ddp))(ddp.params),
    "in jit": lambda ddp: jax.jit(jax.grad(of_gradients(ddp)))(ddp.params),
    "of a jitted function": lambda ddp: jax.grad(jax.jit(of_gradients(ddp)))(ddp.params),
    "hessian": lambda ddp: jax.hessian(of_value(ddp))(ddp.params),
    "by an argument": lambda ddp: jax.grad(lambda s: ddp.value_and_grad(loss)(ddp.params, s)[0])(
        1.0
    ),
}
BATCHES = {
    "of parameters": lambda ddp: jax.vmap(ddp.value_and_grad(loss))(twice(ddp.params)),
    "in jit": lambda ddp: jax.jit(jax.vmap(ddp.value_and_grad(loss)))(twice(ddp.params)),
    "of an argument": lambda ddp: jax.vmap(lambda s: ddp.value_and_grad(loss)(ddp.params, s))(
        jnp.ones(2)
    ),
    "of what the loss has from outside": lambda ddp: jax.vmap(
        lambda s: ddp.value_and_grad(lambda params: loss(params) * s)(ddp.params)
    )(jnp.ones(2)),
}


def check_refused(uses, message, error=NotImplementedError):
    """Each of ``uses`` raises, and after each one wrapper is as good as new, in jit and out of it.

    All in one run: outside of jit each run of ranks compiles each operation anew.
    """

    def rank():
        ddp = DistributedDataParallel({"w": jnp.arange(1.0, 5.0)})
        step = ddp.value_and_grad(lambda params: loss(params, 1.0 + dist.get_rank()))
        jitted, grads = jax.jit(step), {}
        for how, use in uses.items():
            with pytest.raises(error) as refused:
                use(ddp)
            assert re.search(message, str(refused.value)), f"{how}: {refused.value}"
            grads[how] = [np.asarray(f(ddp.params)[1]["w"]) for f in (jitted, step)]
        return grads

    for grads in run_ranks(rank, 2):
        assert grads.keys() == uses.keys()
        for how, of_both in grads.items():
            np.testing.assert_array_equal(of_both, [3 * np.arange(1.0, 5.0)] * 2, err_msg=how)


def test_derivatives_are_refused_and_the_wrapper_stays_usable():
    check_refused(DERIVATIVES, f"{WHAT} has no derivative: it cannot be inside of jax.grad")


def test_batches_are_refused_and_the_wrapper_stays_usable():
    check_refused(BATCHES, r"cannot be inside of jax.vmap: each rank makes its calls once")


def test_averages_have_no_derivative_either():
    def use(ddp):
        jax.grad(lambda g: ddp.average({"w": g})["w"].sum())(jnp.ones(4))

    check_refused({"average": use}, "DistributedDataParallel.average has no derivative")


def test_an_error_in_the_loss_outside_of_jit_leaves_the_wrapper_usable():
    def use(ddp):
        ddp.value_and_grad(lambda params: params["w"] @ jnp.ones(3))(ddp.params)

    check_refused({"a wrong shape": use}, "dot_general requires", TypeError)


def test_inside_of_the_loss_everything_may_be_used():
    def rank():
        ddp = DistributedDataParallel({"w": jnp.arange(1.0, 5.0)})

        def inside(params):
            slopes = jax.vmap(jax.grad(lambda w: w**3))(params["w"])  # 3 w^2
            return slopes.sum()

        return np.asarray(jax.jit(ddp.value_and_grad(inside))(ddp.params)[1]["w"])

    for grad in run_ranks(rank, 2):
        np.testing.assert_array_equal(grad, 6 * np.arange(1.0, 5.0))


def test_no_sync_makes_no_calls_and_has_derivatives():
    def rank():
        ddp = DistributedDataParallel({"w": jnp.arange(1.0, 5.0)})
        with ddp.no_sync():
            return np.asarray(jax.grad(of_gradients(ddp))(ddp.params)["w"])

    for grad in run_ranks(rank, 2):
        np.testing.assert_array_equal(grad, [2.0] * 4)
