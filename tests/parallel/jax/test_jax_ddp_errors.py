"""``DistributedDataParallel`` for pytrees: what is wrong is said."""

from __future__ import annotations

import re

import numpy as np
import pytest

import meshlib as dist
import parallel
from meshlib._calls.future import Future
from meshlib.testing import RankError, run_ranks
from parallel import nn
from parallel.jax import DistributedDataParallel

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from tests.support.parallel.jax_settings import jax_settings  # noqa: E402
from tests.support.parallel.slow_backward import (  # noqa: E402
    LAYERS,
    layers,
    slow_backward,
    user_callback_in_backward,
)

KIB = 1 / 1024  # in MiB

pytestmark = pytest.mark.usefixtures("double_precision")


def test_trees_that_differ_between_ranks_are_an_error_that_names_the_first():
    trees = [
        {"a": np.ones(2), "b": {"w": np.ones((2, 3))}},
        {"a": np.ones(2), "b": {"w": np.ones((3, 2))}},
        {"a": np.ones(2), "b": {"w": np.ones((2, 3)), "x": np.ones(1)}},
    ]

    def rank():
        with pytest.raises(ValueError, match="not the same on all ranks") as error:
            DistributedDataParallel(trees[dist.get_rank()])
        return str(error.value)

    for text in run_ranks(rank, 3):
        line = "rank 1: has parameter ['b']['w'] float64[3, 2] where rank 0 has parameter"
        assert f"{line} ['b']['w'] float64[2, 3]" in text
        assert "rank 2: has parameter ['b']['x'] float64[1], which rank 0 lacks" in text
        assert "rank 0:" not in text


def test_arrays_that_are_not_trained_are_compared_and_numbers_are_not():
    def accepted(first, second):
        def rank():
            leaf = (first, second)[dist.get_rank()]
            DistributedDataParallel({"w": np.ones(2), "n": leaf})

        run_ranks(rank, 2)

    accepted(3, jnp.array(3))
    message = r"has parameter \['n'\] not trained \(int32\[3\]\) where rank 0 .* \(int32\[2\]\)"
    with pytest.raises(RankError, match=message):
        accepted(np.ones(2, "i4"), np.ones(3, "i4"))


def test_float64_is_float32_where_double_precision_is_off():
    def rank():
        ddp = DistributedDataParallel({"w": np.ones(2)})
        return ddp.value_and_grad(lambda params: params["w"].sum())(ddp.params)[1]["w"]

    with jax_settings(jax_enable_x64=False):
        for grad in run_ranks(rank, 2):
            assert grad.dtype == np.float32
            assert grad.tolist() == [1, 1]


def bad_params(ddp):
    ddp.value_and_grad(lambda p: p["w"].sum())({"w": jnp.ones(4), "v": jnp.ones(2)})


def bad_shape(ddp):
    ddp.value_and_grad(lambda p: p["w"].sum())({"w": jnp.ones(5)})


def bad_accumulated(ddp):
    ddp.value_and_grad(lambda p: p["w"].sum(), accumulated={"w": jnp.ones(5)})


def no_gradients(ddp):
    ddp.average({})


def two_hooks(ddp):
    ddp.register_comm_hook(None, print)
    ddp.register_comm_hook(None, print)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (
            bad_params,
            ValueError,
            "params differs from the parameters at construction: it has ['v']",
        ),
        (bad_shape, ValueError, "it has ['w'] float64[5] where the wrapper's parameters has"),
        (bad_accumulated, ValueError, "accumulated['w'] is float64[5]; expected float64[4]"),
        (no_gradients, ValueError, "grads has 0 leaves; expected a gradient for each of the 1"),
        (two_hooks, RuntimeError, "a communication hook is registered already"),
        (lambda ddp: ddp.register_comm_hook(None, 3), TypeError, "hook must be callable"),
        (lambda _: DistributedDataParallel({"n": 3}), ValueError, "no leaf that is a floating"),
        (
            lambda _: DistributedDataParallel({"w": np.ones(2)}, bucket_cap_mb=0),
            ValueError,
            "bucket_cap_mb must be positive",
        ),
        (
            lambda _: DistributedDataParallel({"w": np.ones(2)}, bucket_cap_mb=None),
            TypeError,
            "bucket_cap_mb must be a number (the size of buckets in MiB), got None",
        ),
    ],
)
def test_bad_use(use, error, message):
    def rank():
        ddp = DistributedDataParallel({"w": jnp.ones(4)})
        with pytest.raises(error, match=re.escape(message)):
            use(ddp)

    run_ranks(rank, 2)


def test_a_tree_given_to_the_wrapper_of_modules_is_told_where_its_own_is():
    def rank():
        with pytest.raises(TypeError, match=r"use parallel\.jax\.DistributedDataParallel"):
            parallel.DistributedDataParallel({"w": jnp.ones(1)})
        module = nn.Linear(2, 2, rng=np.random.default_rng(0))
        assert isinstance(parallel.DistributedDataParallel(module), nn.Module)

    run_ranks(rank, 1)


def test_a_hook_that_fails_on_one_rank_is_an_error_on_all():
    def rank():
        ddp = DistributedDataParallel({"a": jnp.ones(300), "b": jnp.ones(300)}, bucket_cap_mb=KIB)

        def hook(group, bucket):
            if group.rank() == 1 and bucket.index() == 1:
                raise LookupError("no such thing")
            return group.all_reduce(bucket.buffer(), async_op=True).get_future()

        ddp.register_comm_hook(ddp.process_group, hook)
        step = jax.jit(lambda p: ddp.value_and_grad(lambda p: (p["a"] * p["b"]).sum())(p)[1])
        expected = "LookupError: no such thing" if dist.get_rank() else "Error"
        for _ in range(2):
            with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
                jax.block_until_ready(step(ddp.params))
            expected = "an earlier backward pass failed"

    run_ranks(rank, 2)


def test_a_hook_that_returns_another_shape_is_told_so():
    def rank():
        ddp = DistributedDataParallel({"a": jnp.ones(300)}, bucket_cap_mb=KIB)

        def hook(_, bucket):
            future = Future()
            future.set_result(bucket.buffer()[:2])
            return future

        ddp.register_comm_hook(None, hook)
        message = r"result for bucket 0: expected float64\[300\], got float64\[2\]"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.jit(ddp.value_and_grad(lambda p: p["a"].sum()))(ddp.params)

    run_ranks(rank, 2)


@pytest.mark.parametrize("slow", [slow_backward, user_callback_in_backward])
def test_a_callback_that_fails_ends_the_pass_and_the_next_one_says_so(slow):
    def rank():
        ddp = DistributedDataParallel(LAYERS, bucket_cap_mb=KIB)
        trouble = []

        def wait():
            if trouble:
                raise ArithmeticError("the user's own")

        step = jax.jit(lambda p: ddp.value_and_grad(lambda p: layers(p, wait, slow))(p)[1])
        for _ in range(3):
            jax.block_until_ready(step(ddp.params))
        dist.barrier()
        trouble.append(True)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"the user's own|aborted"):
            jax.block_until_ready(step(ddp.params))
        trouble.clear()
        with pytest.raises(jax.errors.JaxRuntimeError, match="backward pass"):
            jax.block_until_ready(step(ddp.params))

    for _ in range(3):
        run_ranks(rank, 2)


def test_a_rank_that_leaves_is_named():
    def rank():
        ddp = DistributedDataParallel({"a": jnp.ones(300)}, bucket_cap_mb=KIB)
        if dist.get_rank() == 1:
            raise KeyError("the cause")
        jax.block_until_ready(jax.jit(ddp.value_and_grad(lambda p: p["a"].sum()))(ddp.params))

    with pytest.raises(RankError, match="rank 1 of 2 raised KeyError: 'the cause'"):
        run_ranks(rank, 2)
