"""``permute_start`` and ``permute_done``: messages pass while the program computes."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._job.current import current_world, derived_group
from meshlib.testing import run_ranks
from transport._waiting.deadline import Deadline

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from meshlib import jit as mj  # noqa: E402
from meshlib.extend.jit import host_call  # noqa: E402

RING = [(0, 1), (1, 2), (2, 0)]
SECONDS = 60

pytestmark = pytest.mark.usefixtures("double_precision")


def in_halves(x, perm, tag=0, compute=jnp.sin):
    passing = mj.permute_start(x, perm, tag=tag)
    computed = compute(passing.x)
    return mj.permute_done(passing, after=computed), computed


def during(function):
    """Return a computation that calls ``function()`` when its operand is there."""

    def call(outputs, inputs, _):
        function()
        outputs[0][...] = inputs[0]

    def compute(x):
        (y,) = host_call(call, [jax.ShapeDtypeStruct(x.shape, x.dtype)], x, ordered=False)
        return y

    return compute


def waiting_for(event):
    assert event.wait(SECONDS), "the other rank did not get there"


def test_a_message_passes_while_its_sender_computes():
    """Rank 0 computes from before rank 1 begins until after rank 1 has what rank 0 sent."""
    computing, received = threading.Event(), threading.Event()

    def work():
        computing.set()
        waiting_for(received)

    def rank():
        x = jnp.array([10.0 + dist.get_rank()])
        if dist.get_rank() == 0:
            got, _ = jax.jit(lambda x: in_halves(x, [(0, 1), (1, 0)], compute=during(work)))(x)
        else:
            waiting_for(computing)
            got, _ = jax.jit(lambda x: in_halves(x, [(0, 1), (1, 0)]))(x)
            got.block_until_ready()
            received.set()
        return float(got[0])

    assert run_ranks(rank, 2, timeout=2 * SECONDS) == [11, 10]


def hessian(f):
    return lambda x: jax.hessian(f)(x[0])


@pytest.mark.parametrize(
    ("perm", "transform"),
    [(RING, lambda f: jax.vmap(jax.grad(f))), (RING, hessian), ([(2, 0)], jax.grad)],
)
def test_values_and_derivatives_are_those_of_permute(perm, transform):
    def halves(x):
        got, computed = in_halves(x, perm)
        return (jnp.cos(got) * computed).sum()

    def whole(x):
        return (jnp.cos(mj.permute(x, perm)) * jnp.sin(x)).sum()

    def rank():
        x = jnp.linspace(0, 1, 6).reshape(3, 2) + dist.get_rank()
        both = jax.jit(lambda x: [transform(f)(x) for f in (halves, whole)])
        got, expected = both(x)
        np.testing.assert_allclose(got, expected, rtol=1e-12)

    run_ranks(rank, 3)


def test_outside_of_jit_it_is_the_same():
    def rank():
        x = jnp.arange(3.0) + dist.get_rank()
        return in_halves(x, [(1, 0)])[0].tolist(), in_halves(x, [(1, 0), (0, 1)])[0].tolist()

    assert run_ranks(rank, 2) == [([1, 2, 3], [1, 2, 3]), ([0, 0, 0], [0, 1, 2])]


def test_in_a_loop_and_two_at_a_time():
    """Two rings, of which each message is begun in one round and ends in the next."""
    n, rounds = 3, 4

    def rank():
        def body(passing, _):
            one, other = passing
            there = mj.permute_done(one, after=jnp.sin(other.x))
            back = mj.permute_done(other)
            return (mj.permute_start(there, RING, tag=1), begun(back, 2)), there + 10 * back

        def begun(x, tag):
            return mj.permute_start(x, [(b, a) for a, b in RING], tag=tag)

        def program(x):
            first = mj.permute_start(x, RING, tag=1), begun(x, 2)
            (one, other), seen = jax.lax.scan(body, first, None, rounds)
            return seen, mj.permute_done(one), mj.permute_done(other)

        me = dist.get_rank()
        seen, one, other = jax.jit(program)(jnp.asarray(float(me)))
        assert seen.tolist() == [(me - r) % n + 10 * ((me + r) % n) for r in range(1, rounds + 1)]
        assert (float(one), float(other)) == ((me - 5) % n, (me + 5) % n)

    run_ranks(rank, n)


def test_in_a_group_of_one_nothing_is_sent():
    def rank():
        x = jnp.arange(3.0)
        assert in_halves(x, [(0, 0)])[0].tolist() == [0, 1, 2]
        assert in_halves(x, [])[0].tolist() == [0, 0, 0]
        assert not [r for r in current_world().recorder.records() if r.kind == "all_to_all"]

    run_ranks(rank, 1)


def test_a_peer_that_leaves_meanwhile_is_named():
    computing = threading.Event()

    def rank():
        if dist.get_rank() == 1:
            waiting_for(computing)
            dist.destroy_process_group()
            return
        program = jax.jit(lambda x: in_halves(x, [(0, 1), (1, 0)], compute=during(computing.set)))
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"RankFailedError: .*rank 1"):
            jax.block_until_ready(program(jnp.ones(3)))

    run_ranks(rank, 2, timeout=2 * SECONDS)


def test_a_program_that_fails_between_breaks_it_off_for_all():
    """Nothing is left: neither of the message nor of the books, and the next calls say why."""
    perm = [(0, 1), (1, 0)]

    def fail():
        raise KeyError("between")

    def rank():
        program = jax.jit(lambda x: in_halves(x, perm, compute=during(fail)))
        waits = jax.jit(lambda x: in_halves(x, perm))
        x = jnp.ones(3)
        if dist.get_rank() == 0:
            with pytest.raises(jax.errors.JaxRuntimeError, match="KeyError: 'between'"):
                jax.block_until_ready(program(x))
        else:
            # What rank 0 sent may have come before it failed.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.block_until_ready(waits(x))
        with pytest.raises(jax.errors.JaxRuntimeError, match=BROKEN_OFF):
            jax.block_until_ready(waits(x))
        group = derived_group(derived_group(current_world().default_group, "jit"), "passing")
        queue = call_queue_of(group)
        assert not queue.state.in_jit.under_way
        assert queue.streams.drain(Deadline.after(SECONDS), queue.state.is_receiving)

    run_ranks(rank, 2, timeout=2 * SECONDS)


BROKEN_OFF = r"aborted by rank 0: a permute under way was broken off by KeyError: 'between'"


def test_halves_that_do_not_belong_together_are_refused():
    perm = [(0, 1), (1, 0)]

    def twice(x):
        mj.permute_start(x, perm)
        return mj.permute_start(x, perm).x

    def ended_twice(x):
        passing = mj.permute_start(x, perm, tag=1)
        return mj.permute_done(passing) + mj.permute_done(passing)

    def rank():
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"permute_done with tag 1, but no"):
            jax.block_until_ready(jax.jit(ended_twice)(jnp.ones(2)))
        dist.barrier()  # or the next one's end is that of a permute of this one, too
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"no permute_done came .* tag 0"):
            jax.block_until_ready(jax.jit(twice)(jnp.ones(2)))
        with pytest.raises(ValueError, match="tag is -1"):
            mj.permute_start(jnp.ones(2), perm, tag=-1)

    run_ranks(rank, 2)
