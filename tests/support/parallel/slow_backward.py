"""Models for ``jax.grad`` whose backward pass waits where a test says."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshlib.extend.jit import host_call


def slow_backward(x, wait):
    """Return ``x``; its gradient is there once ``wait()`` has returned."""

    def held_up(outputs, inputs, program):
        wait()

    return in_backward(x, partial(host_call, held_up, ordered=False, aliases=((0, 0),)))


def user_callback_in_backward(x, wait):
    """The same with what JAX has for it."""

    def held_up(g):
        wait()
        return g

    return in_backward(x, lambda results, g: [jax.pure_callback(held_up, results[0], g)])


def in_backward(x, call):
    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(
        lambda x: (x, None),
        lambda _, g: tuple(call([jax.ShapeDtypeStruct(g.shape, g.dtype)], g)),
    )
    return identity(x)


LAYERS = {name: np.ones((16, 16)) / 16 for name in ("first", "middle", "last")}


def layers(params, wait, slow=slow_backward):
    """Return a loss whose backward pass calls ``wait`` before it comes to the first layer."""
    hidden = jnp.tanh(jnp.arange(64.0).reshape(4, 16) @ params["first"])
    hidden = slow(hidden, wait)
    return jnp.sin(jnp.tanh(hidden @ params["middle"]) @ params["last"]).sum()
