"""Assumed by docs/train/jax.md: a reader's parameters, loss, batches and optimizer."""

import jax.numpy as jnp
import numpy as np
import optax

x, y = np.ones((4, 3), np.float32), np.ones(4, np.float32)
batch = batch_1 = batch_2 = (x, y)
valid = np.array([True, True, True, False])
params = {"w": jnp.ones(3), "b": jnp.zeros(())}
optimizer = optax.sgd(0.1)
state = optimizer.init(params)


def losses(params, x, y):
    return (x @ params["w"] + params["b"] - y) ** 2


def loss_fn(params, x, y):
    return losses(params, x, y).mean()
