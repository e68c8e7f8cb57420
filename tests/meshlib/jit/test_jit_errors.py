"""Errors of calls in compiled programs: bad arguments, mismatches, a rank that failed."""

from __future__ import annotations

import re

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import RankError, run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from meshlib import jit as mj  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")


def test_ranks_that_compiled_different_calls_get_an_error_and_no_values():
    def rank():
        dtype = np.float32 if dist.get_rank() else np.float64
        with pytest.raises(jax.errors.JaxRuntimeError, match="CollectiveMismatchError"):
            jax.jit(mj.all_reduce)(jnp.ones(4, dtype)).block_until_ready()
        # The group is broken and says so; nothing hangs.
        with pytest.raises(jax.errors.JaxRuntimeError, match="CollectiveMismatchError"):
            jax.jit(mj.all_reduce)(jnp.ones(4)).block_until_ready()

    run_ranks(rank, 2)


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
