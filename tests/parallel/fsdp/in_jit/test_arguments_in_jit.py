"""Wrong arguments of ``parallel.jax.fsdp``, named on all ranks."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

from parallel.jax import FullyShardedDataParallel, fsdp  # noqa: E402

ONES = {"w": np.ones((4, 2), np.float32)}


@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_argument_of_one_rank_is_named_on_all(bad):
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        for change, kind, text in [
            ({"params": {"w": 3}}, ValueError, f"rank {bad}: params has no array of floating"),
            ({"param_dtype": "int8"}, ValueError, f"rank {bad}: param_dtype must be floating"),
            ({"reduce_dtype": "many"}, TypeError, f"rank {bad}: reduce_dtype must be a dtype"),
            ({"stacked": ["v"]}, ValueError, f"rank {bad}: stacked has 'v', which no leaf"),
            ({"stacked": ["w"]}, ValueError, "option stacked="),
            ({"params": {"w": np.ones(5)}}, ValueError, "has parameter ['w'] float32"),
        ]:
            own = change if dist.get_rank() == bad else {}
            with pytest.raises(kind) as error:
                fsdp.shard(**({"params": ONES, "mesh": mesh} | own))
            assert text in str(error.value)

    run_ranks(program, 2)


def test_wrong_meshes_and_trees():
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
            fsdp.shard(ONES, "dp_shard")
        sharded = FullyShardedDataParallel(ONES, mesh)

        def loss(params, x):
            return (params["w"] * x).sum(), {"whole": params["w"].sum()}

        both = sharded.value_and_grad(loss, has_aux=True)
        (value, aux), grads = jax.jit(both)(sharded.params, 2.0)
        assert (float(value), float(aux["whole"])) == (16.0, 8.0)
        np.testing.assert_array_equal(grads["w"].array, np.full((2, 2), 2.0))
        with pytest.raises(ValueError, match=r"params differs .* \['w'\] float32\[4, 2\]"):
            sharded.value_and_grad(loss)(ONES, 2.0)
        with pytest.raises(TypeError, match=r"rank \d: layers: w is a Part, which cannot be call"):
            FullyShardedDataParallel(ONES, mesh, layers=["w"])
        with pytest.raises(ValueError, match=r"rank \d: layers has 'v.\*', which no leaf is below"):
            FullyShardedDataParallel(ONES, mesh, layers=["v.*"])

    run_ranks(program, 2)
