import jax
import jax.numpy as jnp
import numpy as np

from parallel.jax import DataParallel

jax.config.update("jax_enable_x64", True)
assert len(jax.local_devices()) == 4


def loss(params, x, y):
    return ((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2).mean()


def step(params, batch, lr):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return jax.tree.map(lambda p, g: p - lr * g, params, grads), value


rng = np.random.default_rng(0)
params = {"w": rng.normal(size=(5, 7)), "v": rng.normal(size=7)}
one, many = jax.jit(step), DataParallel(step)
a = b = params
for _ in range(50):
    batch = rng.normal(size=(8, 5)), rng.normal(size=8)
    a, loss_a = one(a, batch, 0.1)
    b, loss_b = many(b, batch, 0.1)
    np.testing.assert_allclose(loss_a, loss_b, rtol=1e-12)
for name in a:
    np.testing.assert_allclose(a[name], b[name], rtol=1e-12, atol=1e-12)
    assert b[name].sharding.device_set == set(jax.local_devices())

# The batch really lies on all of them, and along another dim, too.
where = DataParallel(lambda _, x: x * 2, jax.local_devices()[:2], dim=1)(0.0, np.ones((3, 4)))
assert [shard.data.shape for shard in where.addressable_shards] == [(3, 2)] * 2

# The last batch of an epoch: 2 devices share 6 samples, and no two can share 7.
for size, share in (6, 3), (7, 7):
    batch = rng.normal(size=(size, 5)), rng.normal(size=size)
    a, b = one(a, batch, 0.1)[0], many(b, batch, 0.1)[0]
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-12, atol=1e-12)
    where = DataParallel(lambda _, x: x * 2)(0.0, batch[0])
    assert [shard.data.shape for shard in where.addressable_shards] == [(share, 5)] * 4
