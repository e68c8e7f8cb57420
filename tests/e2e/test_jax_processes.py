"""JAX in real processes: its own mesh of them, and what a rank that dies does to a jitted step."""

import pytest

pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
DEADLINE = 90


def test_mesh_to_jax(meshrun):
    script = meshrun.script("""
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        import meshlib as dist

        dist.init_process_group()
        mesh = dist.DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("dp", "tp"))
        jmesh = mesh.to_jax()
        assert jmesh.shape == {"dp": 2, "tp": 1}, jmesh
        order = [device.process_index for device in jmesh.devices.ravel()]
        assert order == [1, 0], order
        assert mesh.to_jax() == jmesh

        def local(x):
            return jax.lax.psum(x, "dp")

        total = jax.jit(jax.shard_map(local, mesh=jmesh, in_specs=P("dp"), out_specs=P()))
        sharding = NamedSharding(jmesh, P("dp"))
        x = jax.make_array_from_callback((2,), sharding, lambda i: np.array([3.0, 4.0])[i])
        print("sum", float(total(x)[0]), "and", int(dist.all_reduce(np.array(1))), flush=True)
        dist.destroy_process_group()
    """)
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
    script = meshrun.script("""
        import jax
        import numpy as np
        import meshlib as dist
        from meshlib.sharding import DArray, P, Sharding, distribute_array

        dist.init_process_group()
        mesh = dist.DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("dp", "tp"))
        whole = np.arange(24, dtype=np.float32).reshape(4, 6)
        mesh.to_jax()  # before anything else makes JAX look for devices
        x = distribute_array(whole, Sharding(mesh, P(None, ("tp", "dp"))))
        there = x.to_jax()
        assert there.shape == (4, 6)
        assert there.sharding.spec == jax.sharding.PartitionSpec(None, ("tp", "dp"))
        back = DArray.from_jax(jax.jit(lambda y: 2 * y)(there), mesh)
        assert back.sharding == x.sharding, back
        assert np.array_equal(back.full_array(), 2 * whole)
        partial = Sharding(mesh, P(), "dp")
        total = float(distribute_array(whole, partial).to_jax().sum())
        try:
            distribute_array(whole[:3], Sharding(mesh, P("dp"))).to_jax()
        except ValueError as error:
            assert "not split evenly" in str(error), error
        else:
            raise AssertionError("uneven parts became a jax.Array")
        print("sum", total, flush=True)
        dist.destroy_process_group()
    """)
    done = meshrun.run("--nproc-per-node", "2", script, deadline=DEADLINE)
    assert done.code == 0, done.err
    assert done.out.count("sum 276.0") == 2
