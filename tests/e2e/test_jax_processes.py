"""JAX in real processes: its own mesh of them, and what a rank that dies does to a jitted step."""

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
DEADLINE = 90


def test_mesh_to_jax(meshrun):
    script = meshrun.script((PROGRAMS / "mesh_to_jax.py").read_text())
    done = meshrun.run("--nproc-per-node", "2", script, deadline=DEADLINE)
    assert done.code == 0, done.err
    assert done.out.count("sum 7.0 and 2") == 2


def test_a_process_that_dies_in_a_jitted_step_is_named(meshrun):
    script = meshrun.script("""
        import os, signal, sys
        import jax, jax.numpy as jnp
        import meshlib as dist
        from meshlib import jit as mj
        from parallel.jax import DistributedDataParallel

        dist.init_process_group()
        params = {name: jnp.ones((300, 300)) for name in "abc"}
        ddp = DistributedDataParallel(params, bucket_cap_mb=0.1)

        @jax.jit
        def step(params, x):
            def loss(params):
                y = x
                for name in "abc":
                    y = jnp.tanh(y @ params[name])
                return mj.all_reduce(y.sum())
            return ddp.value_and_grad(loss)(params)[1]

        x = jnp.ones((4, 300))
        for _ in range(3):
            jax.block_until_ready(step(params, x))
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for _ in range(100):
                jax.block_until_ready(step(params, x))
        except jax.errors.JaxRuntimeError as error:
            print("raised:", "rank 1" in str(error), flush=True)
            raise SystemExit(3)
    """)
    done = meshrun.run("--nproc-per-node", "2", script, deadline=DEADLINE)
    assert done.code != 0
    assert "raised: True" in done.out, done.err


def test_sharded_arrays_to_jax_and_back(meshrun):
    script = meshrun.script((PROGRAMS / "sharded_arrays_to_jax_and_back.py").read_text())
    done = meshrun.run("--nproc-per-node", "2", script, deadline=DEADLINE)
    assert done.code == 0, done.err
    assert done.out.count("sum 276.0") == 2
