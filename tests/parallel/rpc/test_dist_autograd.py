"""Gradients through remote calls against one process: chains, fans, loops, and JAX's own tape."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshlib import rpc
from parallel.rpc import DistributedOptimizer, Weights, dist_autograd
from tests.parallel.rpc.gradient_workers import gradient, over_workers
from tests.support.parallel.jax_settings import jax_settings


@pytest.fixture(autouse=True)
def _double():
    with jax_settings(jax_enable_x64=True, jax_disable_most_optimizations=True):
        yield


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


@dist_autograd.function
@jax.jit
def layer(w, x):
    return jnp.tanh(x @ w)


@dist_autograd.function
@jax.jit
def loss_of(y, target):
    return jnp.mean((y - target) ** 2)


def same(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-13, atol=1e-14)


W1, W2, X, T = draw(1, 4, 4), draw(2, 4, 4), draw(3, 6, 4), draw(4, 6, 4)


@jax.jit
def in_one_process(w1, w2, x):
    """The loss, and its gradients by all three."""

    def loss(w1, w2, x):
        return jnp.mean((jnp.tanh(jnp.tanh(x @ w1) @ w2) - T) ** 2)

    return jax.value_and_grad(loss, (0, 1, 2))(w1, w2, x)


def test_a_chain_over_workers_has_the_gradients_of_one_process():
    def program():
        w1, w2 = rpc.remote(1, Weights, (W1,)), rpc.remote(2, Weights, (W2,))
        x = Weights(X)
        with dist_autograd.context() as context_id:
            hidden = rpc.rpc_sync("w1", layer, (w1, x))
            assert hidden.shape == (6, 4)
            assert hidden.dtype == np.float64
            loss = loss_of(rpc.rpc_async("w2", layer, (w2, hidden)).wait(), T)
            dist_autograd.backward(context_id, [loss])
            value, (g1, g2, gx) = in_one_process(W1, W2, X)
            same(float(loss), value)
            same(gradient(w1, context_id), g1)
            same(gradient(w2, context_id), g2)
            assert list(dist_autograd.get_gradients(context_id)) == [x]
            same(dist_autograd.get_gradients(context_id)[x], gx)

    over_workers(3, program)


def through(to, w, x):
    """Called on one worker: what another one computes."""
    return rpc.rpc_sync(to, layer, (w, x))


def along(path, ws, x):
    """Compute on the last worker of a path, called from each by the one before."""
    if not path:
        return x
    here = rpc.get_worker_info().id
    return rpc.rpc_sync(path[0], along, (path[1:], ws, layer(ws[here], x)))


@dist_autograd.function
def traced_through(to, w, x):
    return 2 * rpc.rpc_sync(to, layer, (w, x * 3))


def test_nested_calls_and_the_same_worker_again():
    def program():
        w0, w1 = rpc.RRef(Weights(W1)), rpc.remote(1, Weights, (W2,))
        x = Weights(X)
        with dist_autograd.context() as context_id:
            # 0 -> 1 -> 0, and then 1 a second time, via 2.
            hidden = rpc.rpc_sync(1, through, (0, w0, x))
            y = rpc.rpc_sync(2, through, (1, w1, hidden))
            dist_autograd.backward(context_id, [loss_of(y, T)])
            _, (g0, g1, gx) = in_one_process(W1, W2, X)
            same(gradient(w0, context_id), g0)
            same(gradient(w1, context_id), g1)
            same(dist_autograd.get_gradients(context_id)[x], gx)

    over_workers(3, program)


def test_calls_nested_four_deep():
    def program():
        ws = [rpc.RRef(Weights(W1)), rpc.remote(1, Weights, (W2,)), rpc.remote(2, Weights, (W1,))]
        with dist_autograd.context() as context_id:
            y = along((1, 2, 0, 1), ws, X)
            dist_autograd.backward(context_id, [loss_of(y, T)])
            found = [gradient(w, context_id) for w in ws]

        def alone(ws):
            y = X
            for here in (0, 1, 2, 0):
                y = jnp.tanh(y @ ws[here])
            return jnp.mean((y - T) ** 2)

        for actual, expected in zip(found, jax.grad(alone)([W1, W2, W1]), strict=True):
            same(actual, expected)

    over_workers(3, program)


def test_calls_in_a_function_that_jax_differentiates():
    def program():
        w0, w1 = rpc.RRef(Weights(W1)), rpc.remote(1, Weights, (W2,))

        def loss(x, scale):
            first = rpc.rpc_async(2, traced_through, (0, w0, x))
            second = rpc.rpc_async(0, layer, (w0, scale * x))
            hidden = sum(rpc.wait_all([first, second]))
            return jnp.sum(rpc.rpc_sync(1, layer, (w1, hidden)) ** 2)

        @jax.jit
        def alone(x, scale, w0, w1):
            def loss(x, scale, w0, w1):
                hidden = 2 * jnp.tanh(x * 3 @ w0) + jnp.tanh(scale * x @ w0)
                return jnp.sum(jnp.tanh(hidden @ w1) ** 2)

            return jax.value_and_grad(loss, (0, 1, 2, 3))(x, scale, w0, w1)

        value, grads = alone(X, 1.5, W1, W2)
        with dist_autograd.context() as context_id:
            found, (gx, gs) = jax.value_and_grad(loss, (0, 1))(X, 1.5)
            same(found, value)
            for actual, expected in zip(
                (gx, gs, gradient(w0, context_id), gradient(w1, context_id)), grads, strict=True
            ):
                same(actual, expected)
        # The same function, recorded as a whole: its calls hang on weights elsewhere only.
        x = Weights(X)
        with dist_autograd.context() as context_id:
            whole = dist_autograd.forward(loss, x, 1.5)
            dist_autograd.backward(context_id, [whole], retain_graph=True)
            same(dist_autograd.get_gradients(context_id)[x], grads[0])
            same(gradient(w0, context_id), grads[2])
            dist_autograd.backward(context_id, [whole])
            same(gradient(w1, context_id), 2 * grads[3])

    over_workers(3, program)


@dist_autograd.function
def embed(table, ids):
    return {"rows": table[ids], "count": ids.shape[0], "ids": ids + 1}


def test_value_and_grad_has_the_gradients_of_weights_here_and_of_integers_there():
    ids = np.array([0, 2, 2])

    def program():
        here, table = rpc.RRef(Weights(W1)), rpc.remote(1, Weights, (W2,))

        def loss(scale, ids):
            found = rpc.rpc_sync(1, embed, (table, ids))
            assert found["count"] == 3
            return jnp.mean(layer(here, found["rows"]) ** 2) * scale * found["ids"].sum()

        def plain(w, table, scale, ids):
            return jnp.mean(jnp.tanh(table[ids] @ w) ** 2) * scale * (ids + 1).sum()

        w = W1
        for scale in (1.0, 2.0):
            with dist_autograd.context() as context_id:
                value, of_scale = dist_autograd.value_and_grad(loss)(scale, ids)
                found = [gradient(it, context_id) for it in (here, table)]
            expected, grads = jax.value_and_grad(plain, (0, 1, 2))(w, W2, scale, ids)
            same(value, expected)
            for actual, grad in zip([*found, of_scale], grads, strict=True):
                same(actual, grad)
            here.local_value().value = w = w - grads[0]
        with dist_autograd.context(), pytest.raises(TypeError, match="Recorded"):
            jax.value_and_grad(loss)(1.0, ids)

    over_workers(2, program)


def test_the_optimizer_steps_where_the_weights_live():
    def program():
        w1, w2 = rpc.remote(1, Weights, (W1,)), rpc.remote(2, Weights, (W2,))
        optimizer = DistributedOptimizer(optax.sgd, [w1, w2], 0.5, momentum=0.9)
        values, traces = [np.asarray(W1), np.asarray(W2)], [0.0, 0.0]
        for _ in range(3):
            with dist_autograd.context() as context_id:
                y = rpc.rpc_sync(2, layer, (w2, rpc.rpc_sync(1, layer, (w1, X))))
                dist_autograd.backward(context_id, [loss_of(y, T)])
                optimizer.step(context_id)
            _, grads = in_one_process(*values, X)
            traces = [0.9 * t + np.asarray(g) for t, g in zip(traces, grads, strict=False)]
            values = [value - 0.5 * t for value, t in zip(values, traces, strict=True)]
        same(w1.to_here(), values[0])
        same(w2.to_here(), values[1])

    over_workers(3, program)


def test_without_rpc_a_recorded_function_is_only_called():
    same(layer(Weights(W1), X), np.tanh(X @ W1))
