"""Sharded pytrees inside ``jax.jit``: equal to one process, at 1/n of the memory."""

import functools

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402
from jit_training import (  # noqa: E402
    MODELS,
    alone,
    assert_close,
    in_jit,
    tokens_batch,
    train,
    transformer_loss,
    transformer_params,
)

from parallel.jax import (  # noqa: E402
    FullyShardedDataParallel,
)

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize(
    ("name", "n", "keep"),
    [
        ("mlp", 4, False),
        ("mlp", 2, True),
        ("transformer", 2, False),
        ("remat", 2, False),
    ],
)
def test_equal_to_one_process(name, n, keep):
    make, loss, batches = MODELS[name]

    def program():
        mesh = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("dp_shard",))
        fsdp = FullyShardedDataParallel(make(np.random.default_rng(0)), mesh, keep_gathered=keep)
        params = train(fsdp.value_and_grad(loss), fsdp.params, batches, dist.get_rank(), n)
        return in_jit(fsdp.unshard, params)

    for got in run_ranks(program, n, timeout=120):
        assert_close(got, alone(name))


def test_eight_ranks_two_replicas_of_four_parts():
    make, loss, batches = MODELS["mlp"]

    def program():
        mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
        fsdp = FullyShardedDataParallel(make(np.random.default_rng(0)), mesh)
        params = train(fsdp.value_and_grad(loss), fsdp.params, batches, dist.get_rank(), 8)
        return in_jit(fsdp.unshard, params)

    for got in run_ranks(program, 8, timeout=120):
        assert_close(got, alone("mlp"))


def test_with_tensor_parallel():
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        params = transformer_params(np.random.default_rng(0))
        tp, part = mesh["tp"], mesh.get_local_rank("tp")
        for p in params["blocks"]:
            p["up"] = np.split(p["up"], 2, axis=1)[part]
            p["down"] = np.split(p["down"], 2, axis=0)[part]
        fsdp = FullyShardedDataParallel(params, mesh["dp_shard"])
        loss = functools.partial(transformer_loss, tp=tp)
        place = mesh.get_local_rank("dp_shard")
        params = train(fsdp.value_and_grad(loss), fsdp.params, tokens_batch, place, 2)
        whole = in_jit(fsdp.unshard, params)
        for p in whole["blocks"]:
            for name, axis in (("up", 1), ("down", 0)):
                both = [np.empty_like(p[name]) for _ in range(2)]
                tp.all_gather(both, np.ascontiguousarray(p[name]))
                p[name] = np.concatenate(both, axis)
        return whole

    for got in run_ranks(program, 4, timeout=120):
        assert_close(got, alone("transformer"))


def live_bytes(n, keep):
    """Return what XLA gives a rank's step, in layers of 12: parts and states, and the rest.

    Nothing runs: two ranks compile, the first and the last.
    """
    optax = pytest.importorskip("optax")
    width, layers = 64, 12

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return (x * x).mean()

    def program():
        mesh = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("dp_shard",))
        params = [np.ones((width, width)) for _ in range(layers)]
        fsdp = FullyShardedDataParallel(params, mesh, keep_gathered=keep)
        if dist.get_rank() not in {0, n - 1}:
            return np.zeros(2)
        optimizer = optax.adam(1e-3)

        def step(params, states, x):
            value, grads = fsdp.value_and_grad(loss)(params, x)
            updates, states = optimizer.update(grads, states, params)
            return optax.apply_updates(params, updates), states, value

        states, x = optimizer.init(fsdp.params), np.ones((2, width))
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(fsdp.params, states, x).compile()
        memory = compiled.memory_analysis()
        given = memory.argument_size_in_bytes - x.nbytes
        # New parts and states take the place of the old.
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1000
        return np.array([given, memory.temp_size_in_bytes]) / (width * width * 8)

    return np.max(run_ranks(program, n), axis=0)


def test_whole_parameters_and_gradients_do_not_stay():
    for keep, least, most in ((True, 12, 14), (False, 0, 5)):
        own, more = live_bytes(4, keep)
        assert own == pytest.approx(3 * 12 / 4, rel=1e-3)
        # Whole: this layer and the next one, in their layouts, and gradients under way.
        assert least <= more <= most


def calls_of_a_step(keep):
    def loss(params, x):
        for name in ("a", "b", "c"):
            x = jnp.tanh(x @ params[name].T)
        return (x * x).mean()

    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        sizes = {"a": 4, "b": 6, "c": 8}
        widths = dict(zip(sizes, [10, 4, 6], strict=True))
        params = {name: np.ones((size, widths[name])) for name, size in sizes.items()}
        fsdp = FullyShardedDataParallel(params, mesh, keep_gathered=keep)
        seen = []

        def observe(group, header, device, run):
            if header.kind.name in ("ALL_GATHER", "REDUCE_SCATTER"):
                seen.append((header.kind.name, header.elements))
            return run

        step = jax.jit(fsdp.value_and_grad(loss))
        calls = mesh.process_group.companion("jit", "in jit")
        with calls.observed(observe):
            jax.block_until_ready(step(fsdp.params, np.ones((2, 10))))
        return seen

    first, second = run_ranks(program, 2)
    assert first == second
    return first


def test_gathers_and_reductions_come_in_the_order_of_their_use():
    gathered = [("ALL_GATHER", size) for size in (40, 24, 48)]
    reduced = [("REDUCE_SCATTER", size) for size in (48, 24, 40)]
    assert calls_of_a_step(keep=True) == gathered + reduced
    calls = calls_of_a_step(keep=False)
    assert calls[:3] == gathered
    assert [call for call in calls if call[0] == "REDUCE_SCATTER"] == reduced
    # The first layer's are not needed in backward: nobody asks for its input's gradient.
    assert [call for call in calls[3:] if call[0] == "ALL_GATHER"] == gathered[:0:-1]
    assert calls.index(reduced[0]) < len(calls) - 1 - calls[::-1].index(gathered[1])


def test_optax_on_parts_and_states_as_global_arrays():
    optax = pytest.importorskip("optax")

    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        params = transformer_params(np.random.default_rng(0))
        fsdp = FullyShardedDataParallel(params, mesh)
        optimizer = optax.adamw(1e-2)

        @jax.jit
        def step(params, state, batch):
            _, grads = fsdp.value_and_grad(transformer_loss)(params, batch)
            norm = fsdp.global_norm(grads)
            grads = jax.tree_util.tree_map(lambda g: g * jnp.minimum(1, 0.5 / norm), grads)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, norm

        params, state = fsdp.params, optimizer.init(fsdp.params)
        assert state[0].mu["embedding"].shape[0] < 11
        for i in range(3):
            params, state, norm = step(params, state, tokens_batch(i, dist.get_rank(), 2))
        world = fsdp.to_global(params)
        assert isinstance(world["embedding"], dist.DArray)
        moved = jax.tree_util.tree_map(
            lambda x: x.redistribute(dist.P()), world, is_leaf=lambda x: isinstance(x, dist.DArray)
        )
        back = fsdp.from_global(moved)
        for a, b in zip(*map(jax.tree_util.tree_leaves, (back, params)), strict=True):
            np.testing.assert_array_equal(a, b)
        return float(norm), in_jit(fsdp.unshard, params)

    params = transformer_params(np.random.default_rng(0))
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    state = optimizer.init(params)

    @jax.jit
    def step_of_one(params, state, batch):
        grads = jax.grad(transformer_loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    for i in range(3):
        params, state, norm = step_of_one(params, state, tokens_batch(i))
    norm = float(norm)
    for got_norm, got in run_ranks(program, 2, timeout=120):
        assert got_norm == pytest.approx(norm, rel=1e-9)
        assert_close(got, jax.tree_util.tree_leaves(params))


def test_gradients_of_microbatches_are_reduced_once_or_each_time():
    def loss(params, x):
        return ((x @ params["w"] + params["b"]) ** 2).mean() * params["scale"]

    def make():
        rng = np.random.default_rng(0)
        return {"b": rng.normal(size=3), "scale": np.array(2.0), "w": rng.normal(size=(5, 3))}

    def batch(rank, micro):
        return np.random.default_rng([rank, micro]).normal(size=(4, 5))

    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        rank, fsdp = dist.get_rank(), FullyShardedDataParallel(make(), mesh)

        def grad(params, micro, **options):
            return fsdp.value_and_grad(loss, **options)(params, batch(rank, micro))[1]

        def plus(a, b):
            return jax.tree_util.tree_map(jnp.add, a, b)

        @jax.jit
        def each(params):
            return plus(grad(params, 0), grad(params, 1))

        @jax.jit
        def once(params):
            with fsdp.no_sync():
                own = grad(params, 0)
            return grad(params, 1, accumulated=own)

        @jax.jit
        def by_hand(params):
            with fsdp.no_sync():
                own = plus(grad(params, 0), grad(params, 1))
            return fsdp.average(own)

        seen, results = [], []

        def observe(group, header, device, run):
            seen.append(header.kind.name)
            return run

        calls = mesh.process_group.companion("jit", "in jit")
        for step in (each, once, by_hand):
            seen.clear()
            with calls.observed(observe):
                results.append(jax.block_until_ready(step(fsdp.params)))
            assert seen.count("REDUCE_SCATTER") == (4 if step is each else 2)
        with pytest.raises(ValueError, match="accumulated"):
            fsdp.value_and_grad(loss, accumulated=fsdp.params)
        return [jax.tree_util.tree_map(np.asarray, result) for result in results]

    grads = [jax.grad(loss)(make(), batch(rank, m)) for rank in range(2) for m in range(2)]
    whole = jax.tree_util.tree_map(lambda *each: np.asarray(sum(each) / 2), *grads)
    for rank, results in enumerate(run_ranks(program, 2, timeout=120)):
        rows = {"b": [slice(0, 2), slice(2, 3)], "w": [slice(0, 3), slice(3, 5)]}
        mine = {name: x[rows[name][rank]] if name in rows else x for name, x in whole.items()}
        for result in results:
            for name, value in mine.items():
                np.testing.assert_allclose(result[name], value, rtol=0, atol=1e-12)


def test_aux_and_wrong_arguments():
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        fsdp = FullyShardedDataParallel({"w": np.ones((4, 2))}, mesh)

        def loss(params, x):
            return (params["w"] * x).sum(), {"whole": params["w"].sum()}

        (value, aux), grads = fsdp.value_and_grad(loss, has_aux=True)(fsdp.params, 2.0)
        assert (float(value), float(aux["whole"])) == (16.0, 8.0)
        np.testing.assert_array_equal(grads["w"], np.full((2, 2), 2.0))
        with pytest.raises(ValueError, match=r"params differs .* \['w'\] float64\[4, 2\]"):
            fsdp.value_and_grad(loss)({"w": np.ones((4, 2))}, 2.0)
        with pytest.raises(TypeError, match="fun must return one floating point number"):
            fsdp.value_and_grad(lambda p: p["w"])(fsdp.params)
        with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
            FullyShardedDataParallel({"w": np.ones(4)}, "dp_shard")
        with pytest.raises(ValueError, match=r"rank \d: params has no array of floating point"):
            FullyShardedDataParallel({"w": 3}, mesh)

    run_ranks(program, 2)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_argument_of_one_rank_is_named_on_all(bad):
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        for change, kind, text in [
            ({"params": {"w": 3}}, ValueError, f"rank {bad}: params has no array of floating"),
            ({"keep_gathered": 2}, TypeError, f"rank {bad}: keep_gathered must be a bool, got 2"),
        ]:
            own = change if dist.get_rank() == bad else {}
            with pytest.raises(kind) as error:
                FullyShardedDataParallel(**({"params": {"w": np.ones(4)}, "mesh": mesh} | own))
            assert text in str(error.value)

    run_ranks(program, 2)


def test_trees_that_differ_are_named_on_every_rank():
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        with pytest.raises(ValueError, match=r"rank 1: has parameter \['w'\] float64\[5\]"):
            FullyShardedDataParallel({"w": np.ones(4 + dist.get_rank())}, mesh)

    run_ranks(program, 2)
