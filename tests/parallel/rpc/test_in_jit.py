"""Remote calls in compiled programs, against plain JAX in one process."""

import gc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_workers import gradient, in_thread, over_workers
from jax_settings import jax_settings

from meshlib import rpc
from parallel.rpc import Weights, dist_autograd


@pytest.fixture(autouse=True)
def _double(request):
    double = "in_single" not in request.node.name
    with jax_settings(jax_enable_x64=double, jax_disable_most_optimizations=True):
        yield


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


W0, W1, W2, X = draw(1, 4, 4), draw(2, 4, 4), draw(3, 4, 4), draw(4, 6, 4)


def same(actual, expected):
    double = jax.config.read("jax_enable_x64")
    bound = 1e-12 if double else 1e-5
    np.testing.assert_allclose(actual, expected, rtol=bound, atol=bound)
    assert np.asarray(actual).dtype == np.asarray(expected).dtype


@dist_autograd.function
@jax.jit
def layer(w, x):
    return jnp.tanh(x @ w)


@dist_autograd.function
def back_and_forth(to, w, x):
    return 2 * rpc.rpc_sync(to, layer, (w, x * 3))


@dist_autograd.function
@partial(jax.jit, static_argnums=(0, 1))
def compiled_back_and_forth(to, w, x):
    return 2 * rpc.rpc_sync(to, layer, (w, x * 3))


@dist_autograd.function
def embed(table, ids):
    return {"rows": table[ids], "count": ids.shape[0], "ids": ids + 1}


def alone(w0, w1, w2, x, scale):
    first, second = 2 * jnp.tanh(x * 3 @ w0), jnp.tanh(scale * x @ w2)
    return jnp.mean(jnp.tanh((first + second) @ w1) ** 2)


VIA = {"in_single": back_and_forth, "compiled": compiled_back_and_forth}


@pytest.mark.parametrize("via", VIA.values(), ids=VIA)
def test_fans_and_loops_with_a_cached_program_and_a_new_context(via):
    traced = []

    def program():
        w0, w1, w2 = (
            rpc.RRef(Weights(W0)),
            *(rpc.remote(to, Weights, (w,)) for to, w in ((1, W1), (2, W2))),
        )

        @jax.jit
        def step(x, scale):
            def loss(x, scale):
                traced.append(1)
                first = rpc.rpc_async(1, via, (0, w0, x))  # 0 -> 1 -> 0
                second = rpc.rpc_async(2, layer, (w2, scale * x))
                hidden = sum(rpc.wait_all([first, second]))
                return jnp.mean(rpc.rpc_sync("w1", layer, (w1, hidden)) ** 2)

            return jax.value_and_grad(loss, (0, 1))(x, scale)

        plain = jax.jit(jax.value_and_grad(alone, (0, 1, 2, 3, 4)))
        for x in (jnp.asarray(X), jnp.asarray(X) + 1):
            with dist_autograd.context() as context_id:
                value, (gx, gs) = step(x, 1.5)
                found = [gradient(w, context_id) for w in (w0, w1, w2)]
            expected, (*ws, ex, es) = plain(*map(jnp.asarray, (W0, W1, W2)), x, 1.5)
            same(value, expected)
            for a, b in zip([*found, gx, gs], [*ws, ex, es], strict=True):
                same(a, b)
        assert len(traced) == 1

    over_workers(3, program)


def test_scan_cond_while_and_checkpoint():
    def program():
        w = rpc.remote(1, Weights, (W1,))

        def run(layer_of):
            def body(h, use):
                return jax.lax.cond(use, layer_of, lambda h: h * 2, h), h.sum()

            def loss(x):
                h, sums = jax.lax.scan(body, x, jnp.array([True, False, True]))
                h = jax.checkpoint(layer_of)(h)
                return jnp.mean(h**2) + sums.mean()

            return jax.value_and_grad(loss)

        def remote(h):
            return rpc.rpc_sync(1, layer, (w, h))

        def twice(h):
            return jax.lax.while_loop(
                lambda state: state[0] < 2, lambda state: (state[0] + 1, remote(state[1])), (0, h)
            )[1]

        x = jnp.asarray(X)
        with dist_autograd.context() as context_id:
            value, grad = jax.jit(run(remote))(x)
            found = gradient(w, context_id)

        def plain(w, x):
            return run(lambda h: jnp.tanh(h @ w))(x)[0]

        expected, (gw, gx) = jax.jit(jax.value_and_grad(plain, (0, 1)))(W1, x)
        same(value, expected)
        same(grad, gx)
        same(found, gw)
        same(jax.jit(twice)(x), np.tanh(np.tanh(X @ W1) @ W1))  # in no context

    over_workers(2, program)


def test_weights_here_and_integers_there_get_gradients_by_value_and_grad():
    ids = np.array([0, 2, 2])

    def program():
        here, table = rpc.RRef(Weights(W0)), rpc.remote(1, Weights, (W1,))

        def loss(scale, ids):
            found = rpc.rpc_sync(1, embed, (table, ids))
            assert found["count"] == 3
            return jnp.mean(layer(here, found["rows"]) ** 2) * scale * found["ids"].sum()

        def plain(w, table, scale, ids):
            return jnp.mean(jnp.tanh(table[ids] @ w) ** 2) * scale * (ids + 1).sum()

        step = jax.jit(dist_autograd.value_and_grad(loss))
        plain_step = jax.jit(jax.value_and_grad(plain, (0, 1, 2)))
        w, t = W0, W1
        for scale in (1.0, 2.0):
            with dist_autograd.context() as context_id:
                value, of_scale = step(scale, ids)
                found = [gradient(it, context_id) for it in (here, table)]
            expected, grads = plain_step(w, t, scale, ids)
            same(value, expected)
            for a, b in zip([*found, of_scale], grads, strict=True):
                same(a, b)
            here.local_value().value = w = w - grads[0]  # the program takes what there is

        # Where gradients would be lost, JAX's own says so; without a context there are none.
        with dist_autograd.context(), pytest.raises(RuntimeError, match="would be lost unseen"):
            jax.jit(jax.value_and_grad(loss))(1.0, ids)
        same(jax.jit(loss)(2.0, ids), plain_step(w, t, 2.0, ids)[0])
        with pytest.raises(RuntimeError, match="was run outside of any autograd context"):
            step(1.0, ids)

    over_workers(2, program)


def broken(x):
    raise KeyError(f"no {x.shape}")


@dist_autograd.function(returns=lambda w, x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def by_value(w, x):
    if not x.sum() > 0:  # which cannot be traced
        raise ArithmeticError("a sum is not positive")
    return jnp.sin(w * x)


@dist_autograd.function
def by_value_unsaid(w, x):
    return jnp.sin(w * x) if x.sum() > 0 else x


def test_errors_of_the_callee_arrive_as_they_are():
    def program():
        w = rpc.remote(1, Weights, (W1[0],))
        x = jnp.arange(4.0)
        grad = jax.jit(jax.grad(lambda x: rpc.rpc_sync(1, by_value, (w, x)).sum()))
        with pytest.raises(KeyError, match=r"no \(4,\)") as caught:
            jax.jit(lambda x: rpc.rpc_sync(1, broken, (x,)))(x)
        assert "in broken" in str(caught.value.__cause__)
        for _ in range(2):
            with dist_autograd.context():
                with pytest.raises(ArithmeticError, match="not positive") as caught:
                    grad(-x)
                assert "in by_value" in str(caught.value.__cause__)
                same(grad(x), W1[0] * np.cos(W1[0] * np.arange(4.0)))
        with pytest.raises(TypeError, match=r"(?s)by_value_unsaid .*returns=\.\.\."):
            jax.jit(lambda x: rpc.rpc_sync(1, by_value_unsaid, (w, x)))(x)

    over_workers(2, program)


def test_what_has_no_place_in_a_program_is_refused():
    def program():
        w = rpc.remote(1, Weights, (W1,))

        def through(x):
            return rpc.rpc_sync(1, layer, (w, x))

        with dist_autograd.context():
            with pytest.raises(NotImplementedError, match="second derivative"):
                jax.jit(jax.grad(jax.grad(lambda x: through(jnp.full((1, 4), x)).sum())))(1.0)
            recorded = layer(Weights(W0), X)
            with pytest.raises(TypeError, match="of one step for ever"):
                jax.jit(lambda x: layer(x, recorded))(W1)
            with pytest.raises(NotImplementedError, match="stays on the other worker"):
                jax.jit(lambda x: rpc.remote(1, layer, (w, x)))(X)
            with pytest.raises(NotImplementedError, match=r"then\(\)"):
                jax.jit(lambda x: rpc.rpc_async(1, layer, (w, x)).then(print))(X)

    over_workers(2, program)


def test_threads_in_contexts_of_their_own_run_one_program():
    def program():
        here, via = rpc.RRef(Weights(W0)), compiled_back_and_forth
        step = jax.jit(jax.grad(lambda x: rpc.rpc_sync(1, via, (0, here, x)).sum()))

        def train(seed):
            for i in range(2):
                x = draw(100 * seed + i, 2, 4)
                of_z = 2 * (1 - np.tanh(3 * x @ W0) ** 2)
                with dist_autograd.context() as context_id:
                    gx = step(x)
                    gw = gradient(here, context_id)
                same(gw, 3 * x.T @ of_z)
                same(gx, 3 * of_z @ W0.T)

        for done in [in_thread(train, seed) for seed in range(3)]:
            done()

    over_workers(2, program)


def test_what_was_recorded_in_one_context_is_not_gone_back_through_in_another():
    def program():
        w = rpc.remote(1, Weights, (W1[0],))
        compiled = jax.jit(lambda x: rpc.rpc_sync(1, by_value, (w, x)).sum())
        with dist_autograd.context():
            _, back = jax.vjp(compiled, X[0] ** 2)
        with dist_autograd.context() as context_id:
            jax.vjp(compiled, X[1] ** 2)  # as much is recorded here
            with pytest.raises(RuntimeError, match="was recorded in another autograd context"):
                back(jnp.ones(()))
            assert gradient(w, context_id) is None

    over_workers(2, program)


def test_weights_that_have_become_others_are_refused():
    def program():
        here = rpc.RRef(Weights(W0))
        step = jax.jit(dist_autograd.value_and_grad(lambda x: layer(here, x).sum()))
        for wrong in (W0[:1], W0.astype(np.float32)):
            with dist_autograd.context():
                here.local_value().value = W0
                step(X)
                here.local_value().value = wrong
                with pytest.raises(TypeError, match=r"are \[float.*, and were \[float64\[4, 4\]\]"):
                    step(X)
        with pytest.raises(TypeError, match=r"key_data gives those of a key"):
            jax.jit(lambda key: rpc.rpc_sync(1, layer, (W0, key)))(jax.random.key(0))

    over_workers(2, program)


class Refused(Exception):
    pass


@dist_autograd.function(returns=lambda x: x)
def refuses(x):
    raise Refused("seen")


def test_a_program_keeps_nothing_of_what_has_ended_it():
    def program():
        compiled = jax.jit(lambda x: rpc.rpc_sync(1, refuses, (x,)))

        def seen():
            with pytest.raises(Refused, match="seen") as caught:
                compiled(X)
            return weakref.ref(caught.value)

        error = seen()
        gc.collect()
        assert error() is None

    over_workers(2, program)


def test_vmap_makes_a_call_for_each_element():
    def program():
        w = rpc.remote(1, Weights, (W1,))

        remote = jax.vmap(jax.value_and_grad(lambda x: rpc.rpc_sync(1, layer, (w, x)).mean()))
        x = X[:3]
        y = np.tanh(x @ W1)
        of_y = (1 - y**2) / 4
        with dist_autograd.context() as context_id:
            for run in (jax.jit(remote), remote):
                for a, b in zip(run(x), (y.mean(1), of_y @ W1.T), strict=True):
                    same(a, b)
            same(gradient(w, context_id), 2 * x.T @ of_y)

    over_workers(2, program)
