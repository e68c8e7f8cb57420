"""Assumed by docs/program/rpc-autograd.md: two ranks, and a recorded function."""

import jax.numpy as jnp

from parallel.rpc import dist_autograd

RANKS = 2


@dist_autograd.function
def layer(w, x):
    return jnp.tanh(x @ w)
