"""Optax's transformations, sharded over the replicas."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import nn, optim
from parallel.zero import ZeroRedundancyOptax

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

jnp = jax.numpy


TRANSFORMATIONS = {
    "adamw": lambda: optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5)),
    "chain": lambda: optax.chain(
        optax.add_decayed_weights(0.01), optax.sgd(0.05, 0.9, nesterov=True)
    ),
    "lamb": lambda: optax.lamb(1e-2),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
}


def test_our_adam_is_optax_s():
    ours = nn.Parameter(np.random.default_rng(0).normal(size=(4, 3)))
    theirs = jnp.asarray(ours.data, np.float32)
    optimizer, transformation = optim.Adam([ours], lr=0.01), optax.adam(0.01)
    state = transformation.init(theirs)
    for step in range(5):
        ours.grad = np.random.default_rng(step + 1).normal(size=(4, 3))
        optimizer.step()
        updates, state = transformation.update(jnp.asarray(ours.grad, np.float32), state)
        theirs = optax.apply_updates(theirs, updates)
    np.testing.assert_allclose(theirs, ours.data, rtol=0, atol=1e-6)


def test_what_looks_at_all_leaves_at_once_cannot_be_sharded():
    """Its shared state, here how often a gradient was not finite, is another one on each rank."""
    guarded = optax.apply_if_finite(optax.sgd(1), 9)

    def job():
        sharded = ZeroRedundancyOptax(guarded)
        leaves = {"0": jnp.full(2, np.nan), "1": jnp.ones(2)}
        _, state = sharded.update(leaves, sharded.init(leaves), leaves)
        with pytest.raises(ValueError, match=r"is 1 on rank 0 and 0 on rank 1.*cannot be sharded"):
            sharded.consolidate(state, leaves)

    run_ranks(job, 2)


PARAMS = {
    "layers": [{"w": np.ones((4, 3)), "b": np.zeros(3)}, {"w": np.ones((3, 5)), "b": np.zeros(5)}],
    "scale": np.float32(2.0),
}


def tree(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map(
        lambda leaf: jnp.asarray(rng.normal(size=np.shape(leaf)), dtype), PARAMS
    )


def run_tree(tx, steps, params, state, jitted, first=0):
    update = jax.jit(tx.update) if jitted else tx.update
    for step in range(first, first + steps):
        updates, state = update(tree(100 + step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def same(got, expected, tolerance=1e-6):
    assert jax.tree_util.tree_structure(got) == jax.tree_util.tree_structure(expected)
    for mine, theirs in zip(*map(jax.tree_util.tree_leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "jitted"),
    [("adamw", True), ("lamb", True), ("injected", True), ("chain", True), ("chain", False)],
)
def test_pytrees(name, jitted):
    plain = TRANSFORMATIONS[name]()

    def job():
        sharded = ZeroRedundancyOptax(plain)
        tx = optax.chain(optax.clip_by_global_norm(1.0), sharded)
        params = tree(0)
        params, state = run_tree(tx, 3, params, tx.init(params), jitted)
        whole = sharded.consolidate(state[1], params)
        for to in range(2):
            part = sharded.consolidate(state[1], params, to)
            assert (part is None) == (to != dist.get_rank())
        # What was taken apart and put together again goes on as before.
        state = (state[0], sharded.shard(whole, params))
        params, _ = run_tree(tx, 2, params, state, jitted, first=3)
        return params, whole

    reference = optax.chain(optax.clip_by_global_norm(1.0), plain)
    middle, state = run_tree(reference, 3, tree(0), reference.init(tree(0)), jitted)
    expected, _ = run_tree(reference, 2, middle, state, jitted, first=3)
    for params, whole in run_ranks(job, 2):
        same(params, expected)
        same(whole, state[1])


def test_pytrees_share_the_states():
    params = {f"w{i}": jnp.zeros((16, 16)) for i in range(8)}

    def job():
        state = ZeroRedundancyOptax(optax.adam(1e-3)).init(params)
        return sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(state) if leaf.ndim)

    assert run_ranks(job, 4) == [2 * 8 * 16 * 16 * 4 // 4] * 4


def test_mixed_dtypes_and_fewer_leaves_than_ranks():
    def job():
        tx = ZeroRedundancyOptax(optax.sgd(0.5))
        params = {"a": jnp.ones(3), "b": jnp.ones((2, 2), jnp.bfloat16)}
        updates, _ = tx.update(params, tx.init(params), params)
        return jax.tree_util.tree_map(lambda leaf: (leaf.dtype.name, leaf.tolist()), updates)

    for updates in run_ranks(job, 3):
        assert updates["a"] == ("float32", [-0.5] * 3)
        assert updates["b"] == ("bfloat16", [[-0.5, -0.5]] * 2)


def test_a_state_of_another_transformation():
    def job():
        params = tree(0)
        with pytest.raises(KeyError, match="another transformation"):
            ZeroRedundancyOptax(optax.adam(1)).shard(optax.sgd(1).init(params), params)

    run_ranks(job, 1)
