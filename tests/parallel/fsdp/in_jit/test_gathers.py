"""When parts are gathered inside ``jax.jit``, in which dtype, and what a rank has in memory."""

import functools

import numpy as np
import pytest

import meshlib as dist
from meshlib import extend
from meshlib._job.current import derived_group
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from parallel.jax import fsdp  # noqa: E402
from tests.support.parallel.jit_training import REMAT, SHARDED, How  # noqa: E402
from transport._calls.codes import dtype_code  # noqa: E402

WIDTH, LAYERS = 256, 24
X = np.ones((1, WIDTH), np.float32)
FLOAT, HALF = dtype_code(np.dtype(np.float32)), dtype_code(np.dtype(np.float16))

KEPT = How(fsdp.gather, lambda fn: lambda parts, x: fn(fsdp.gather(parts), x))
"""Without ``jax.checkpoint`` the whole parameters are saved for backward."""


def dense(w, x):
    return jnp.tanh(x @ w.T)


def loss(parts, x, how):
    one = how.layer(dense)
    if isinstance(parts, list):
        for part in parts:
            x = one(part, x)
    else:
        x, _ = jax.lax.scan(lambda x, part: (one(part, x), None), x, parts)
    return (x * x).mean()


def make_parts(mesh, stacked):
    weights = np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32)
    if stacked:
        return fsdp.shard({"w": weights}, mesh, stacked=["w"])["w"]
    return fsdp.shard(list(weights), mesh)


def seen_calls(mesh, run):
    """Return the collectives that ``run()`` makes: their kinds, elements and dtypes."""
    seen = []

    def observe(group, header, device, call):
        if header.kind.name in ("ALL_GATHER", "REDUCE_SCATTER"):
            seen.append((header.kind.name, header.elements, header.dtype))
        return call

    with extend.observe(derived_group(mesh.process_group, "jit", "in jit"), observe):
        jax.block_until_ready(run())
    return seen


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    ("stacked", "how", "least", "most"),
    [
        (True, REMAT, 1, 2),
        (False, REMAT, 1, 2),
        (True, SHARDED, 1, 3),
        (False, SHARDED, 1, 3),
        (True, KEPT, LAYERS, LAYERS + 4),
        (False, KEPT, LAYERS, LAYERS + 4),
    ],
)
def test_temporary_memory_of_24_layers(n, stacked, how, least, most):
    """What XLA takes beside its arguments and results: gradients (parameters/n), and two layers.

    Three where all that layers compute is saved. The new parameters take the place of the old.
    """

    def program():
        mesh = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("dp_shard",))
        parts = make_parts(mesh, stacked)

        def step(parts, x):
            value, grads = jax.value_and_grad(loss)(parts, x, how)
            return jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, parts, grads), value

        if dist.get_rank():
            return 0.0  # nothing runs: one rank compiles
        compiled = jax.jit(step, donate_argnums=0).lower(parts, X)
        memory = compiled.compile().memory_analysis()
        return memory.temp_size_in_bytes / (WIDTH * WIDTH * 4)

    layers, *_ = run_ranks(program, n)
    activations = 2 * LAYERS * X.size / WIDTH**2
    assert least <= layers <= LAYERS / n + most + activations


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(("how", "times"), [(REMAT, 2), (SHARDED, 2), (KEPT, 1)])
def test_checkpoint_gathers_again_in_backward(stacked, how, times):
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        parts = make_parts(mesh, stacked)
        step = jax.jit(jax.grad(functools.partial(loss, how=how)))
        return seen_calls(mesh, lambda: step(parts, X))

    calls, others = run_ranks(program, 2)
    assert calls == others
    gathered = ("ALL_GATHER", WIDTH * WIDTH, FLOAT)
    # In a loop the first layer's are not needed in backward, where nothing is recomputed: nobody
    # asks for the gradient of its input.
    unused = int(how is SHARDED and not stacked)
    assert calls.count(gathered) == times * LAYERS - unused
    reduced = [call for call in calls if call[0] == "REDUCE_SCATTER"]
    assert len(reduced) == LAYERS
    assert calls[:LAYERS] == [gathered] * LAYERS
    if times == 2:  # a layer is gathered, and reduced before the next one is gathered
        assert calls[LAYERS : LAYERS + 4] == [gathered, reduced[0]] * 2


def test_small_arrays_share_a_call_and_large_ones_have_their_own():
    def program():
        mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("dp_shard",))
        rng = np.random.default_rng(0)
        shapes = {"a": (5, 2), "b": (1,), "large": (512, 130), "none": (0, 3), "number": ()}
        params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        params = jax.tree_util.tree_map(np.float32, params) | {"half": np.ones(7, np.float16)}
        parts = fsdp.shard(params, mesh)
        gather, wholes = jax.jit(fsdp.gather), []
        calls = seen_calls(mesh, lambda: wholes.append(gather(parts)) or wholes)
        for name, value in params.items():
            np.testing.assert_array_equal(wholes[0][name], value)
            assert parts[name].shape == value.shape
        return calls

    for calls in run_ranks(program, 3):
        assert sorted(calls) == [
            ("ALL_GATHER", 7, HALF),
            ("ALL_GATHER", 11, FLOAT),
            ("ALL_GATHER", 512 * 130, FLOAT),
        ]


def test_gathers_in_one_dtype_and_reduces_in_another():
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        w = np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32)
        parts = fsdp.shard(w, mesh, param_dtype="bfloat16", reduce_dtype="float32")
        x = (np.arange(8 * 300).reshape(8, 300) % (7 + dist.get_rank())).astype(jnp.bfloat16)
        seen_dtypes = []

        def loss(parts, x):
            w = fsdp.gather(parts)
            seen_dtypes.append(w.dtype)
            return (x @ w).astype(np.float32).sum()

        step, results = jax.jit(jax.value_and_grad(loss)), []
        calls = seen_calls(mesh, lambda: results.append(step(parts, x)) or results)
        assert seen_dtypes == [jnp.bfloat16]
        assert [(kind, dtype) for kind, _, dtype in calls] == [
            ("ALL_GATHER", dtype_code(np.dtype(jnp.bfloat16))),
            ("REDUCE_SCATTER", FLOAT),
        ]
        assert results[0][1].array.dtype == np.float32
        return np.asarray(results[0][1].array)

    x = [np.arange(8 * 300).reshape(8, 300) % (7 + rank) for rank in range(2)]
    expected = np.stack([each.sum(0).astype(jnp.bfloat16) for each in x]).astype(np.float32)
    got = np.concatenate(run_ranks(program, 2))
    np.testing.assert_array_equal(got, np.tile(expected.mean(0)[:, None], 300))


def test_microbatches_inside_the_loss_are_reduced_once():
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        parts = fsdp.shard({"w": np.ones((6, 3), np.float32), "b": np.ones(3, np.float32)}, mesh)
        xs = np.arange(4 * 6, dtype=np.float32).reshape(4, 1, 6) + dist.get_rank()

        def loss(parts, xs):
            params = fsdp.gather(parts)
            return jax.lax.map(lambda x: ((x @ params["w"] + params["b"]) ** 2).sum(), xs).mean()

        step, grads = jax.jit(jax.grad(loss)), []
        calls = seen_calls(mesh, lambda: grads.append(step(parts, xs)) or grads)
        assert [kind for kind, *_ in calls] == ["ALL_GATHER", "REDUCE_SCATTER"]
        return jax.tree_util.tree_map(np.asarray, jax.jit(fsdp.gather)(grads[0]))

    def one(params, x):
        return ((x @ params["w"] + params["b"]) ** 2).sum()

    params = {"w": np.ones((6, 3), np.float32), "b": np.ones(3, np.float32)}
    xs = [np.arange(4 * 6, dtype=np.float32).reshape(4, 1, 6) + rank for rank in range(2)]
    each = [jax.grad(one)(params, x) for own in xs for x in own]
    expected = jax.tree_util.tree_map(lambda *grads: sum(grads) / 8, *each)
    for got in run_ranks(program, 2):
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-6)


def test_the_next_layer_may_be_gathered_beside_this_one():
    """``after`` the input of the layer before: two layers are whole, and not all."""

    def program(ahead):
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        parts = make_parts(mesh, stacked=False)
        if dist.get_rank():
            return 0.0

        def output(parts, x):
            inputs = [x]
            for place, part in enumerate(parts):
                x = dense(fsdp.gather(part, after=inputs[max(place - ahead, 0)]), x)
                inputs.append(x)
            return x

        compiled = jax.jit(output).lower(parts, X).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (WIDTH * WIDTH * 4)

    assert [round(run_ranks(program, 2, ahead)[0]) for ahead in (0, 1)] == [1, 2]


def test_a_batch_of_samples_shares_a_gather_and_so_does_a_batch_of_models():
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        w = np.random.default_rng(0).normal(size=(4, 6, 6)).astype(np.float32)
        models, xs = fsdp.shard(w, mesh, stacked=[""]), np.ones((4, 6), np.float32)
        one = fsdp.layer(dense)

        def of_one(models):
            first = jax.tree_util.tree_map(lambda x: x[0], models)
            return jax.vmap(one, (None, 0))(first, xs).sum()

        def of_all(models):
            return jax.vmap(one)(models, xs).sum()

        found = []
        for loss in (of_one, of_all):
            step = jax.jit(jax.value_and_grad(loss))
            calls = seen_calls(mesh, lambda step=step: found.append(step(models)) or found)
            assert [kind for kind, *_ in calls] == ["ALL_GATHER", "REDUCE_SCATTER"]
        grads = [np.asarray(jax.jit(fsdp.gather)(grads)) for _, grads in found]
        np.testing.assert_allclose(grads[1], jax.grad(lambda w: dense_sum(w, xs))(w), 1e-5, 1e-5)
        expected = jax.grad(lambda w: dense_sum(w[:1].repeat(4, 0), xs))(w)
        np.testing.assert_allclose(grads[0], expected, 1e-5, 1e-5)

    def dense_sum(w, xs):
        return jax.vmap(dense)(w, xs).sum()

    run_ranks(program, 2)


def test_a_layer_may_have_inputs_of_any_kind():
    """Tokens come before anything with a gradient, and random keys before the tokens."""

    def embed(table, key, tokens):
        return table[tokens] + jax.random.normal(key, (3, 1))

    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        part = fsdp.shard(np.ones((5, 4), np.float32), mesh)
        tokens = jnp.array([0, 4, 4])

        @jax.jit
        def step(part, key, tokens):
            return jax.grad(lambda part: fsdp.layer(embed)(part, key, tokens).sum())(part)

        grads = step(part, jax.random.key(0), tokens)
        return np.asarray(jax.jit(fsdp.gather)(grads))

    for got in run_ranks(program, 2):
        np.testing.assert_array_equal(got, np.array([1, 0, 0, 0, 2])[:, None].repeat(4, 1))


def test_parts_may_be_computed_inside_of_a_checkpoint():
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        part = fsdp.shard(np.full((4, 4), 0.5, np.float32), mesh)

        @jax.jit
        def step(part, x):
            def one(part, x):
                doubled = jax.tree_util.tree_map(lambda rows: jnp.tanh(2 * rows), part)
                return jnp.sin(x @ fsdp.gather(doubled, after=jnp.cos(x)))

            policy = jax.checkpoint_policies.everything_saveable
            return jax.grad(lambda part: jax.checkpoint(one, policy=policy)(part, x).sum())(part)

        return np.asarray(jax.jit(fsdp.gather)(step(part, jnp.ones(4))))

    w = np.full((4, 4), 0.5, np.float32)
    expected = jax.grad(lambda w: jnp.sin(jnp.ones(4) @ jnp.tanh(2 * w)).sum())(w)
    for got in run_ranks(program, 2):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
