"""JAX's DistributedDataParallel over a mesh dim that compresses."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax")
jnp = jax.numpy

from parallel.jax import DistributedDataParallel  # noqa: E402

N, STEPS = 2, 4
# The large one is reduced where XLA has it, the others in one bucket.
SIZES = {"large": 300_007, "odd": 50_001, "small": 7}


def gradient(rank, step, name):
    seed = [rank, step, *name.encode()]
    return np.random.default_rng(seed).standard_normal(SIZES[name]).astype("f4")


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
@pytest.mark.parametrize("jitted", [False, True])
def test_gradients_are_compressed_late_and_never_lost(jitted, backend):
    def job():
        compress = {"dp": dist.Compression("int8", error_feedback=True)}
        mesh = dist.init_device_mesh("cpu", (N,), mesh_dim_names=("dp",), compress=compress)
        zeros = {name: jnp.zeros(size, "float32") for name, size in SIZES.items()}
        model = DistributedDataParallel(zeros, mesh["dp"])

        def loss(params, weights):
            return sum((params[name] * weights[name]).sum() for name in params)

        value_and_grad = model.value_and_grad(loss)
        if jitted:
            value_and_grad = jax.jit(value_and_grad)
        sums = {name: np.zeros(size) for name, size in SIZES.items()}
        for step in range(STEPS):
            weights = {name: jnp.asarray(gradient(dist.get_rank(), step, name)) for name in SIZES}
            _, grads = value_and_grad(model.params, weights)
            sums = {name: total + np.asarray(grads[name]) for name, total in sums.items()}
        kept = model._exchange.reducer.residuals()
        return sums, {path: kept[n] for n, path in enumerate(model._tree.trained())}

    results = run_ranks(job, N, backend=backend)
    (first, _), (second, _) = results
    for name in SIZES:
        assert first[name].tobytes() == second[name].tobytes()
        exact = sum(gradient(r, s, name) / N for r in range(N) for s in range(STEPS))
        (late,) = {path for path in results[0][1] if name in path}
        kept = sum(left[late] for _, left in results) / N
        assert np.abs(first[name] - exact).max() > 1e-3
        np.testing.assert_allclose(first[name] + kept, exact, atol=2e-4)
