"""Contexts: where they are, when they end, what fails in them; two at once."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from meshlib import rpc
from parallel import optim
from parallel.rpc import DistributedOptimizer, Recorded, Weights, dist_autograd
from tests.parallel.rpc.gradient_workers import (
    contexts,
    gradient,
    in_thread,
    over_workers,
    wait_until_forgotten,
)

X = np.arange(1.0, 4.0, dtype=np.float32)


@dist_autograd.function
def scaled(w, x):
    return w * x


@dist_autograd.function
def total(*values):
    return sum(jnp.sum(value) for value in values)


@dist_autograd.function
def fails_late(w, x):
    scaled(w, x)
    raise KeyError("late")


def by_way_of(to, w, x):
    return rpc.rpc_sync(to, scaled, (w, x))


def fails_after(to, w, x):
    rpc.rpc_sync(to, scaled, (w, x))
    raise KeyError("after")


def weights(to, value=2.0):
    return rpc.remote(to, Weights, (jnp.full(3, value, jnp.float32),))


def test_fan_out_fan_in_and_results_that_nobody_uses():
    def program():
        ws = [weights(to, to) for to in (1, 2, 1)]
        x = Weights(jnp.asarray(X))
        with dist_autograd.context() as context_id:
            calls = [rpc.rpc_async(w.owner(), scaled, (w, x)) for w in ws]
            values = [call.wait() for call in calls]
            rpc.rpc_sync(1, scaled, (ws[0], values[1]))  # nobody uses it
            with pytest.raises(KeyError, match="late"):
                rpc.rpc_sync(2, fails_late, (ws[1], values[0]))
            with pytest.raises(KeyError, match="after"):
                rpc.rpc_sync(2, fails_after, (1, ws[2], values[0]))
            dist_autograd.backward(context_id, [total(*values, values[0])])
            for w, times in zip(ws, (2, 1, 1), strict=True):
                np.testing.assert_array_equal(gradient(w, context_id), times * X)
            own = dist_autograd.get_gradients(context_id)[x]
            np.testing.assert_array_equal(own, [1 + 2 + 1 + 1] * 3)
        wait_until_forgotten(3)

    over_workers(3, program)


def test_ids_differ_and_contexts_end_everywhere_also_after_an_error():
    def program():
        w = weights(2)
        ids = []
        for fails in (False, True):
            try:
                with dist_autograd.context() as context_id:
                    ids.append(context_id)
                    value = rpc.rpc_sync(1, by_way_of, (2, w, X))
                    assert [rpc.rpc_sync(to, contexts) for to in range(3)] == [1, 1, 1]
                    if fails:
                        raise KeyError("in the block")
            except KeyError:
                assert fails
            wait_until_forgotten(3)
        assert ids[0] != ids[1] != rpc.rpc_sync(1, own_id)
        assert rpc.rpc_sync(1, own_id) >> 48 == 1
        # What comes after the end is refused, and makes nothing anew.
        with pytest.raises(RuntimeError, match=f"the autograd context {ids[1]} has ended"):
            rpc.rpc_sync(1, total, (value,))
        with pytest.raises(ValueError, match="it has ended"):
            dist_autograd.get_gradients(ids[1])
        with pytest.raises(ValueError, match="it has made no call to this worker"):
            dist_autograd.backward(7, [])
        wait_until_forgotten(3)

    over_workers(3, program)


def own_id():
    with dist_autograd.context() as context_id:
        return context_id


def test_two_contexts_in_two_threads_do_not_mix():
    def program():
        w = weights(1)
        both = threading.Barrier(2)

        def train(factor):
            with dist_autograd.context() as context_id:
                value = rpc.rpc_sync(1, scaled, (w, factor * X))
                both.wait(40)
                dist_autograd.backward(context_id, [total(value)])
                both.wait(40)
                return np.asarray(gradient(w, context_id))

        other = in_thread(train, 2)
        np.testing.assert_array_equal(train(1), X)
        np.testing.assert_array_equal(other(), 2 * X)

    over_workers(2, program)


def test_an_rref_goes_backward_on_its_owner():
    def program():
        w = weights(1)
        with dist_autograd.context() as context_id:
            loss = rpc.remote(1, total, (rpc.rpc_sync(1, scaled, (w, X)),))
            loss.backward()
            np.testing.assert_array_equal(gradient(w, context_id), X)
            local = rpc.RRef(total(scaled(w.to_here(), X)))
            local.backward(context_id)
            np.testing.assert_array_equal(gradient(w, context_id), 2 * X)
            with pytest.raises(TypeError, match=r"roots\[0\] must be a recorded value"):
                rpc.RRef(3.0).backward(context_id)
        with pytest.raises(RuntimeError, match="outside any autograd context"):
            loss.backward()

    over_workers(2, program)


def test_wrong_uses_are_named():
    def program():
        w = weights(1)
        with dist_autograd.context() as context_id:
            value = rpc.rpc_sync(1, scaled, (w, X))
            assert isinstance(value, Recorded)
            for use in (lambda: jnp.sum(value), lambda: np.sin(value), lambda: value.value + value):
                with pytest.raises(TypeError):
                    use()
            with pytest.raises(TypeError, match="would lose its gradient"):
                np.asarray(value)
            with pytest.raises(RuntimeError, match=r"in the autograd context .* already"):
                dist_autograd.context().__enter__()
            with pytest.raises(ValueError, match=r"roots\[0\] must be a scalar, got .* \[3\]"):
                dist_autograd.backward(context_id, [value])
            loss = total(value)
            dist_autograd.backward(context_id, [loss])
            with pytest.raises(RuntimeError, match=r"freed the graph of .*total.*retain_graph"):
                dist_autograd.backward(context_id, [loss])
        with dist_autograd.context(), pytest.raises(ValueError, match="values of one context"):
            total(value)
        import optax

        for wrong, error, words in (
            ((optax.sgd(1.0), [w]), TypeError, "an optax transformation, which cannot be sent"),
            ((optax.sgd, [3]), TypeError, r"params_rref\[0\] must be an RRef"),
            ((optax.sgd, []), ValueError, "params_rref is empty"),
            ((optax.sgd, [rpc.remote(1, list)], 0.1), TypeError, "got objects of"),
            ((optim.SGD, [w]), TypeError, r"is SGD, but .* to Weights; .*optax.adam"),
        ):
            with pytest.raises(error, match=words):
                DistributedOptimizer(*wrong)

    over_workers(2, program)


def test_second_derivatives_and_derivatives_in_no_context_are_refused():
    import jax

    def program():
        w = weights(1)

        def loss(x):
            return jnp.sum(rpc.rpc_sync(1, scaled, (w, x)) ** 2)

        x = jnp.asarray(X)
        with pytest.raises(RuntimeError, match="outside of any autograd context"):
            jax.grad(loss)(x)
        with dist_autograd.context():
            with pytest.raises(NotImplementedError, match="was differentiated twice"):
                jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(x)
            with pytest.raises(NotImplementedError, match=r"rpc\.remote\(\) was called"):
                jax.grad(lambda x: rpc.remote(1, scaled, (w, x)))(x)

    over_workers(2, program)


def test_calls_and_weights_in_a_compiled_function_are_refused():
    import jax

    def program():
        w, here, x = weights(1), weights(0), jnp.asarray(X)

        def call(x):
            return rpc.rpc_sync(1, scaled, (w, x))

        def loop(x):
            return jax.lax.scan(lambda x, _: (call(x), None), x, length=2)[0]

        with dist_autograd.context():
            recorded = scaled(here, x)
            for compiled, what in (
                (jax.jit(call), "scaled was called remotely"),
                (loop, "scaled was called remotely"),
                (jax.jit(jax.grad(lambda x: jnp.sum(call(x)))), "scaled was called remotely"),
                (jax.jit(lambda x: x + rpc.rpc_sync(1, scaled, (w, X))), "was called remotely"),
                (jax.jit(lambda x: rpc.remote(1, scaled, (w, x))), "scaled was called remotely"),
                (jax.jit(lambda x: scaled(here, x)), "scaled was called with Weights"),
                (jax.jit(lambda x: scaled(x, recorded)), "scaled was called with Recorded"),
            ):
                with pytest.raises(NotImplementedError, match=f"{what} .* JAX compiles"):
                    compiled(x)
            with pytest.raises(NotImplementedError, match="batched"):
                jax.vmap(call)(x[:, None])
            # What the function itself computes may be compiled; a call of constants is made once.
            np.testing.assert_array_equal(jax.jit(lambda x: scaled(x, x))(x), X * X)
            assert jax.jit(lambda x: x + rpc.rpc_sync(1, int, ("3",)))(x)[0] == X[0] + 3

    over_workers(2, program)


@dist_autograd.function
def breaks_backward(w, x):
    return jnp.sum(breaking(w * x))


def breaking(x):
    import jax

    @jax.custom_vjp
    def same(x):
        return x

    def backward(_, grad):
        raise KeyError("in a derivative")

    same.defvjp(lambda x: (x, None), backward)
    return same(x)


def test_an_error_in_a_derivative_arrives_and_the_context_ends():
    def program():
        w = weights(2)
        with dist_autograd.context() as context_id:
            value = rpc.rpc_sync(1, through_broken, (w,))
            with pytest.raises(KeyError, match="in a derivative"):
                dist_autograd.backward(context_id, [value])
        wait_until_forgotten(3)

    over_workers(3, program)


def through_broken(w):
    return rpc.rpc_sync(2, breaks_backward, (w, X))
