"""Programs of random calls over three workers, against the same program in one process."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlib import rpc
from parallel.rpc import Weights, dist_autograd
from tests.parallel.rpc import gradient_workers
from tests.parallel.rpc.gradient_workers import gradient
from tests.support.parallel.jax_settings import jax_settings

RANKS = 3
START = tuple(np.random.default_rng(5).standard_normal((RANKS + 1, 2)))

step = st.tuples(
    st.sampled_from(["here", "call", "async", "nested", "back and forth", "traced", "remote"]),
    st.integers(0, RANKS - 1),
    st.integers(0, RANKS - 1),
    st.integers(0, 99),
    st.integers(0, 99),
)


@jax.jit
def plain(w, a, b):
    return w * a + jnp.sin(b)


@dist_autograd.function
def mixed(w, a, b):
    return plain(w, a, b)


def nested(ws, to, a, b):
    return rpc.rpc_sync(to, mixed, (ws[to], a, b))


def there_and_back(ws, to, back, a, b):
    """On worker ``to``, which has worker ``back`` work with what it has made."""
    return rpc.rpc_sync(back, mixed, (ws[back], mixed(ws[to], a, b), a))


@dist_autograd.function
def traced(ws, to, back, a, b):
    """Calls in a function that JAX differentiates."""
    first = rpc.rpc_async(to, mixed, (ws[to], a, b))
    second = rpc.rpc_sync(back, mixed, (ws[back], b, a))
    return plain(first.wait(), second, a)


def over_workers(kind, ws, to, back, a, b):
    match kind:
        case "here":
            return mixed(ws[0], a, b)
        case "call":
            return rpc.rpc_sync(to, mixed, (ws[to], a, b))
        case "async":
            return rpc.rpc_async(to, mixed, (ws[to], a, b)).wait()
        case "nested":
            return rpc.rpc_sync(back, nested, (ws, to, a, b))
        case "back and forth":
            return rpc.rpc_sync(to, there_and_back, (ws, to, back, a, b))
        case "remote":
            return rpc.remote(to, mixed, (ws[to], a, b)).to_here()
        case _:
            return rpc.rpc_sync(back, traced, (ws, to, back, a, b))


def in_one_process(kind, ws, to, back, a, b):
    match kind:
        case "here":
            return plain(ws[0], a, b)
        case "call" | "async" | "nested" | "remote":
            return plain(ws[to], a, b)
        case "back and forth":
            return plain(ws[back], plain(ws[to], a, b), a)
        case _:
            return plain(plain(ws[to], a, b), plain(ws[back], b, a), a)


def run(steps, do, ws, x, end):
    values = [x]
    for kind, to, back, i, j in steps:
        a, b = values[i % len(values)], values[j % len(values)]
        values.append(do(kind, ws, to, back, a, b))
    return end(values[-1], values[len(values) // 2])


@jax.jit
def summed(a, b):
    return jnp.sum(a * b)


@dist_autograd.function
def loss_of(a, b):
    return summed(a, b)


def check(steps):
    ws = [rpc.remote(to, Weights, (START[to],)) for to in range(RANKS)]
    x = Weights(START[RANKS])
    with dist_autograd.context() as context_id:
        loss = run(steps, over_workers, ws, x, loss_of)
        dist_autograd.backward(context_id, [loss])
        value = float(loss)
        found = [gradient(w, context_id) for w in ws]
        found.append(dist_autograd.get_gradients(context_id).get(x))

    def alone(values):
        return run(steps, in_one_process, values[:RANKS], values[RANKS], summed)

    expected, grads = jax.value_and_grad(alone)([jnp.asarray(it) for it in START])
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for actual, grad in zip(found, grads, strict=True):
        np.testing.assert_allclose(np.zeros(2) if actual is None else actual, grad, 1e-12, 1e-12)


def test_random_programs_have_the_gradients_of_one_process():
    programs = st.lists(step, min_size=1, max_size=8)
    random_programs = settings(max_examples=12)(given(programs)(check))
    with jax_settings(jax_enable_x64=True, jax_disable_most_optimizations=True):
        gradient_workers.over_workers(RANKS, random_programs)
