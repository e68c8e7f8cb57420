"""Data parallel programs for a GPU average by collectives of their own: the same as on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel.jax import DistributedDataParallel
from parallel.jax import _data_parallel as data_parallel
from parallel.jax._on_gpu import _buckets, is_on_gpu


def params():
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
        "b": jnp.zeros(3, jnp.float32),
        "half": jnp.ones((5,), jnp.float16),
        "steps": jnp.zeros((), jnp.int32),
    }


def loss(p, x):
    return ((jnp.tanh(x @ p["w"] + p["b"])) ** 2).sum() + p["half"].sum().astype(jnp.float32)


def gradients():
    """Of a step, of one after an accumulated one, and averaged by hand."""
    ddp = DistributedDataParallel(params(), bucket_cap_mb=0.00003)
    x = jnp.asarray(np.random.default_rng(dist.get_rank()).normal(size=(6, 4)), jnp.float32)
    value, first = jax.jit(ddp.value_and_grad(loss))(ddp.params, x)

    @jax.jit
    def twice(p, x):
        with ddp.no_sync():
            _, before = ddp.value_and_grad(loss)(p, x)
        return ddp.value_and_grad(loss, accumulated=before)(p, 2 * x)[1]

    own = jax.grad(loss, allow_int=True)(ddp.params, x)
    own["steps"] = None
    averaged = jax.jit(ddp.average)(own)
    return jax.tree.map(np.asarray, (value, first, twice(ddp.params, x), averaged))


def test_a_program_for_a_gpu_gives_the_same_gradients(monkeypatch):
    expected = run_ranks(gradients, 2)
    monkeypatch.setattr(data_parallel, "is_on_gpu", bool)
    for got, wanted in zip(run_ranks(gradients, 2), expected, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)


def test_it_is_lowered_for_cuda_and_takes_no_hook(monkeypatch):
    monkeypatch.setattr(data_parallel, "is_on_gpu", lambda leaves: True)

    def body():
        ddp = DistributedDataParallel(params())
        step = jax.jit(ddp.value_and_grad(loss))
        text = step.trace(ddp.params, jnp.ones((6, 4))).lower(lowering_platforms=("cuda",))
        # float32 and float16
        assert text.as_text().count("@xla_buffer_python_gpu_callback") == 2
        with pytest.raises(RuntimeError, match="on a GPU"):
            ddp.register_comm_hook(None, lambda state, bucket: None)

    run_ranks(body, 2)


def test_buckets_begin_with_the_last_gradients_and_hold_one_dtype():
    arrays = [jnp.ones(n, d) for n, d in [(4, "f4"), (3, "f2"), (5, "f4"), (20, "f4"), (1, "f2")]]
    assert _buckets(arrays, 40) == [[3], [4, 1], [2, 0]]
    assert not is_on_gpu(arrays)
