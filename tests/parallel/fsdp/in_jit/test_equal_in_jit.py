"""Sharded training inside ``jax.jit`` equals training on one process, on any mesh."""

import functools

import numpy as np
import pytest

import meshlib as dist
from meshlib.checkpoint import Checkpointer
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from parallel.jax import fsdp  # noqa: E402
from tests.support.parallel.jit_training import (  # noqa: E402
    REMAT,
    SHARDED,
    STEPS,
    WHOLE,
    alone,
    assert_close,
    stacked_params,
    start,
    tokens_batch,
    train,
    train_sharded,
    transformer_loss,
    transformer_params,
    whole,
)

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize(
    ("name", "n", "how"),
    [
        ("mlp", 4, SHARDED),
        ("transformer", 2, SHARDED),
        ("transformer", 2, REMAT),
        ("stacked", 2, SHARDED),
        ("stacked", 3, REMAT),
    ],
)
def test_equal_to_one_process(name, n, how):
    def program():
        mesh = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("dp_shard",))
        return train_sharded(name, mesh, how)

    for got in run_ranks(program, n, timeout=120):
        assert_close(got, alone(name)[0])


@pytest.mark.parametrize("name", ["mlp", "stacked"])
def test_two_replicas_of_two_parts(name):
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        return train_sharded(name, mesh)

    for got in run_ranks(program, 4, timeout=120):
        assert_close(got, alone(name)[0])


def test_with_tensor_parallel():
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        params = transformer_params(np.random.default_rng(0))
        tp, part = mesh["tp"], mesh.get_local_rank("tp")
        for p in params["blocks"]:
            p["up"] = np.split(p["up"], 2, axis=1)[part]
            p["down"] = np.split(p["down"], 2, axis=0)[part]
        parts = fsdp.shard(params, mesh["dp_shard"])
        loss = functools.partial(transformer_loss, how=SHARDED, tp=tp)
        place = mesh.get_local_rank("dp_shard")
        state, _ = train(loss, start(parts), tokens_batch, place, 2)
        params = whole(state[0])
        for p in params["blocks"]:
            for name, axis in (("up", 1), ("down", 0)):
                both = [np.empty_like(p[name]) for _ in range(2)]
                tp.all_gather(both, np.ascontiguousarray(p[name]))
                p[name] = np.concatenate(both, axis)
        return params

    for got in run_ranks(program, 4, timeout=120):
        assert_close(got, alone("transformer")[0])


def test_a_run_goes_on_on_another_mesh(tmp_path):
    """Parameters and optimizer states of two replicas of two parts, then of three parts."""

    def run(shape, names, steps):
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        params = stacked_params(np.random.default_rng(0))
        state = start(fsdp.shard(params, mesh, stacked=["blocks"]))
        with Checkpointer(tmp_path, sync=False) as checkpoints:
            if steps.start:
                loaded = checkpoints.load(list(fsdp.to_global(state)))
                state = fsdp.from_global(tuple(loaded), state)
            loss = functools.partial(transformer_loss, how=SHARDED)
            rank, size = mesh.process_group.rank(), mesh.size()
            state, losses = train(loss, state, tokens_batch, rank, size, steps)
            checkpoints.save(list(fsdp.to_global(state)), step=steps.stop)
            return mesh.all_reduce(np.array(losses), op=dist.ReduceOp.AVG)

    _, expected = alone("stacked")
    cut = run_ranks(run, 4, (2, 2), ("dp_replicate", "dp_shard"), range(8), timeout=120)
    for losses in run_ranks(run, 3, (3,), ("dp_shard",), range(8, STEPS), timeout=120):
        np.testing.assert_allclose([*cut[0], *losses], expected, rtol=0, atol=1e-9)


def test_optax_and_the_global_norm():
    optax = pytest.importorskip("optax")
    loss = transformer_loss

    def steps(params, clip, how, batches, rank=0, world=1):
        optimizer = optax.adamw(1e-2)

        @jax.jit
        def step(params, state, batch):
            grads = jax.grad(loss)(params, batch, how)
            norm = clip(grads)
            grads = jax.tree_util.tree_map(lambda g: g * jnp.minimum(1, 0.5 / norm), grads)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, norm

        state, norms = optimizer.init(params), []
        for i in range(5):
            params, state, norm = step(params, state, batches(i, rank, world))
            norms.append(float(norm))
        return params, norms

    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        params = fsdp.shard(transformer_params(np.random.default_rng(0)), mesh)
        rank = dist.get_rank()
        params, norms = steps(params, fsdp.global_norm, SHARDED, tokens_batch, rank, 2)
        return whole(params), norms

    params = transformer_params(np.random.default_rng(0))
    expected, norms = steps(params, optax.tree.norm, WHOLE, tokens_batch)
    assert min(norms) > 0.5  # it clips
    for got, got_norms in run_ranks(program, 2, timeout=120):
        np.testing.assert_allclose(got_norms, norms, rtol=1e-9)
        assert_close(got, expected)
