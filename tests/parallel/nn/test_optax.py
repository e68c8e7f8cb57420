"""Optax's optimizers, for parameters and for pytrees, whole and sharded."""

import copy

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import DistributedDataParallel, ZeroRedundancyOptimizer, nn, optim
from parallel.zero import ZeroRedundancyOptax
from tests.support.parallel.training import assert_close, batch, make_model, parameters

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

jnp = jax.numpy


TRANSFORMATIONS = {
    "adamw": lambda: optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5)),
    "chain": lambda: optax.chain(
        optax.add_decayed_weights(0.01), optax.sgd(0.05, 0.9, nesterov=True)
    ),
    "lamb": lambda: optax.lamb(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
}


def train(model, optimizer, rank=0, world=1, steps=5, first=0):
    loss = nn.CrossEntropyLoss()
    for step in range(first, first + steps):
        x, y = (part[rank::world] for part in batch(step, "f4"))
        optimizer.zero_grad()
        loss(model(x), y)
        model.backward(loss.backward())
        optimizer.step()
    return parameters(model)


def test_it_is_the_optimizer_that_it_says():
    """Our Adam and optax's agree."""
    ours, theirs = make_model(dtype="f4"), make_model(dtype="f4")
    expected = train(ours, optim.Adam(ours.parameters(), lr=0.01))
    got = train(theirs, optim.OptaxOptimizer(theirs.parameters(), optax.adam(0.01)))
    assert_close([got], expected, 1e-5)


@pytest.mark.parametrize("name", ["injected", "lion"])
def test_sharded_by_parameter(name):
    transformation = TRANSFORMATIONS[name]()

    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(make_model(dtype="f4"))
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optim.OptaxOptimizer, transformation=transformation
        )
        train(model, optimizer, rank, 2, steps=3)
        optimizer.consolidate_state_dict(None)
        state = copy.deepcopy(optimizer.state_dict())
        saved = copy.deepcopy(model.module.state_dict())
        return saved, state, train(model, optimizer, rank, 2, steps=3, first=3)

    model = make_model(dtype="f4")
    expected = train(model, optim.OptaxOptimizer(model.parameters(), transformation), steps=6)
    results = run_ranks(job, 2)
    assert_close([got for *_, got in results], expected, 1e-5)
    # The state of two ranks, resumed by one process without sharding, and by ranks again.
    saved, state, _ = results[0]
    model = make_model(dtype="f4")
    model.load_state_dict(saved)
    optimizer = optim.OptaxOptimizer(model.parameters(), transformation)
    optimizer.load_state_dict(state)
    assert_close([train(model, optimizer, steps=3, first=3)], expected, 1e-5)

    def resume():
        model = DistributedDataParallel(make_model(dtype="f4"))
        model.module.load_state_dict(saved)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optim.OptaxOptimizer, transformation=transformation
        )
        optimizer.load_state_dict(state)
        return train(model, optimizer, dist.get_rank(), 3, steps=3, first=3)

    assert_close(run_ranks(resume, 3), expected, 1e-5)


def test_a_parameter_without_a_gradient_counts_as_zero():
    used, unused = nn.Parameter(np.ones(2, "f4")), nn.Parameter(np.ones(3, "f4"))
    optimizer = optim.OptaxOptimizer([used, unused], optax.sgd(0.5))
    used.grad = np.ones(2, "f4")
    optimizer.step()
    np.testing.assert_array_equal(used.data, [0.5, 0.5])
    np.testing.assert_array_equal(unused.data, [1, 1, 1])


def test_bad_use():
    double = nn.Parameter(np.zeros(2))
    double.grad = np.zeros(2)
    with pytest.raises(ValueError, match="float64, which JAX rounds to float32; set"):
        optim.OptaxOptimizer([double], optax.sgd(1)).step()
    single = nn.Parameter(np.zeros(2, "f4"))
    with pytest.raises(TypeError, match=r"must be an optax.GradientTransformation.* got 0.1 "):
        optim.OptaxOptimizer([single], 0.1)
    optimizer = optim.OptaxOptimizer([single], optax.adam(1))
    with pytest.raises(TypeError, match="call step"):
        optimizer.update(single, {})
    state = optim.OptaxOptimizer([single], optax.sgd(1, momentum=0.9)).state_dict()
    with pytest.raises(KeyError, match="lacks"):
        optimizer.load_state_dict(state)


def test_what_looks_at_all_parameters_at_once_cannot_be_sharded():
    """Its shared state, here how often a gradient was not finite, is another one on each rank."""
    guarded = optax.apply_if_finite(optax.sgd(1), 9)

    def job():
        params = [nn.Parameter(np.zeros(2, "f4")), nn.Parameter(np.zeros(2, "f4"))]
        optimizer = ZeroRedundancyOptimizer(params, optim.OptaxOptimizer, transformation=guarded)
        params[0].grad, params[1].grad = np.full(2, np.nan, "f4"), np.ones(2, "f4")
        optimizer.step()
        with pytest.raises(ValueError, match=r"is 1 on rank 0 and 0 on rank 1.*cannot be sharded"):
            optimizer.consolidate_state_dict(None)
        sharded = ZeroRedundancyOptax(guarded)
        leaves = {str(i): jnp.asarray(p.grad) for i, p in enumerate(params)}
        _, state = sharded.update(leaves, sharded.init(leaves), leaves)
        with pytest.raises(ValueError, match="cannot be sharded"):
            sharded.consolidate(state, leaves)

    run_ranks(job, 2)


# Pytrees

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
    ("name", "jitted"), [("adamw", True), ("lamb", True), ("chain", True), ("chain", False)]
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
