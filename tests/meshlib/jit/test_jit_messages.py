"""``send`` and ``recv`` inside ``jax.jit``: derivatives of any order, whose messages are apart."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from meshlib import jit as mj  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")


def simple(x):
    """Rank 0's loss is x0, rank 1's 3 x0 x1."""
    if dist.get_rank() == 0:
        return mj.send(x, 1).sum()
    return (mj.recv(x, 0) * x).sum() * 3


def curved(x):
    """Rank 0's loss is sin(sin(x0)), rank 1's sin(sin(x0)) x1^3."""
    if dist.get_rank() == 0:
        return jnp.sin(mj.send(jnp.sin(x), 1)).sum()
    return (jnp.sin(mj.recv(jnp.sin(x), 0)) * x**3).sum()


def whole(x):
    """Return the sum of both ranks' curved losses, for x = [x0, x1]."""
    return jnp.sin(jnp.sin(x[0])) * (1 + x[1] ** 3)


def along(f):
    """Return the derivative of ``f`` in the direction of ones, forwards."""
    return lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1]


def against(f):
    """Return the same, backwards."""
    return jax.grad(lambda x: f(x).sum())


SECOND_ORDER = {
    "forward over reverse": along(jax.grad(simple)),
    "reverse over reverse": against(jax.grad(simple)),
    "reverse over forward": against(along(simple)),
    "hessian": jax.hessian(simple),
}


@pytest.mark.parametrize("how", SECOND_ORDER)
def test_second_order_and_nothing_is_left_for_the_next_receive(how, caplog):
    def rank():
        me = dist.get_rank()
        x = jnp.array([2.0 + me])
        second = jax.jit(SECOND_ORDER[how])(x)
        # Of the program's own tag 0, of which no derivative has left anything.
        later = jax.jit(lambda x: mj.recv(x, 0) if me else mj.send(x, 1))(77.0 + x - x)
        return float(second.sum()), float(later[0])

    assert run_ranks(rank, 2) == [(3, 77)] * 2
    assert "messages left" not in caplog.text


@pytest.mark.parametrize("outer", [along, against])
def test_third_order(outer):
    x = jnp.array([2.0, 3.0])
    expected = np.asarray(outer(outer(jax.grad(whole)))(x))

    def rank():
        mine = x[dist.get_rank()][None]
        return float(jax.jit(outer(outer(jax.grad(curved))))(mine)[0])

    np.testing.assert_allclose(run_ranks(rank, 2), expected, rtol=1e-12)


def test_batches_of_gradients_whose_cotangents_do_not_vary():
    def rank():
        x = jnp.arange(1.0, 4.0)[:, None] + dist.get_rank()
        return jax.jit(jax.vmap(jax.grad(simple)))(x)[:, 0].tolist()

    # Of x0 + 3 x0 x1.
    assert run_ranks(rank, 2) == [[1 + 3 * x1 for x1 in (2, 3, 4)], [3 * x0 for x0 in (1, 2, 3)]]


def test_messages_of_derivatives_that_nobody_receives_are_apart_and_reported(caplog):
    """In the end rank 1's template is a constant: it takes no tangent, and rank 0 sends one."""

    def rank():
        me = dist.get_rank()

        def moved(x, constant):
            def there(x):
                return mj.recv(jnp.zeros(1) if constant else x, 0) if me else mj.send(x, 1)

            return jax.jit(lambda x: jax.jvp(there, (x,), (5 * x,)))(x)

        x = jnp.ones(1)
        both, (value, _) = moved(x, False), moved(x, me == 1)
        later = jax.jit(lambda x: mj.recv(x, 0) if me else mj.send(x, 1))(7 * x)
        return [float(a[0]) for a in (*both, value, later)]

    assert run_ranks(rank, 2) == [[1, 5, 1, 7]] * 2
    assert "'default in jit, derivative t'" in caplog.text
    assert "messages left: 1 from rank 0 under tag 0" in caplog.text


@pytest.mark.parametrize("backend", ["inproc", "shm", "tcp"])
def test_messages_from_any_member_say_whose_they_are(backend):
    def rank():
        me, size = dist.get_rank(), dist.get_world_size()
        group = dist.new_group([2, 1, 0])
        x = jnp.full((2, 3), 10.0 * me, jnp.float32)
        if me:
            for _ in range(3):  # beside other messages, some of which compiled code makes
                jax.jit(lambda x: mj.send(x, 0, tag=me))(x)
            return jax.jit(lambda x: mj.send(mj.send(x, 0, group, tag=9), 0, tag=9))(x + 1)

        @jax.jit
        def all_of_them(like):
            def step(carry, _):
                return carry, mj.recv_anysource(like, tag=9)

            return jax.lax.scan(step, 0, length=size - 1)[1]

        named = [jax.jit(lambda x, i=i: mj.recv(x, i, tag=i))(x) for _ in range(3) for i in (1, 2)]
        other = [jax.jit(lambda x: mj.recv_anysource(x, group, tag=9))(x) for _ in (1, 2)]
        arrays, sources = all_of_them(x)
        assert sources.dtype == np.int32
        assert [float(a[0, 0]) for a in named] == [10.0, 20.0] * 3
        return [(int(s), np.asarray(a)) for a, s in (*zip(arrays, sources, strict=True), *other)]

    received, *_ = run_ranks(rank, 3, backend=backend)
    assert sorted(source for source, _ in received) == [1, 1, 2, 2]
    for source, array in received:
        np.testing.assert_array_equal(array, np.full((2, 3), 10.0 * source + 1, np.float32))


def test_a_message_from_any_member_has_no_derivative_and_no_batches():
    def rank():
        def received(x):
            return mj.recv_anysource(x)[0].sum()

        x = jnp.ones((2, 3))
        for transformed in (jax.grad(received), jax.jit(jax.grad(received)), jax.vmap(received)):
            with pytest.raises(NotImplementedError, match=r"recv_anysource (has|cannot)"):
                transformed(x)

    run_ranks(rank, 2)
