"""Wrong arguments of ``parallel.jax.fsdp``, named on all ranks."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

from parallel.jax import fsdp  # noqa: E402

ONES = {"w": np.ones((4, 2), np.float32)}


@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_argument_of_one_rank_is_named_on_all(bad):
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        for change, kind, text in [
            ({"params": {"w": 3}}, ValueError, f"rank {bad}: params has no floating-point array"),
            ({"param_dtype": "int8"}, ValueError, f"rank {bad}: param_dtype must be floating"),
            ({"reduce_dtype": "many"}, TypeError, f"rank {bad}: reduce_dtype must be a dtype"),
            ({"stacked": ["v"]}, ValueError, f"rank {bad}: stacked has 'v', which matches no"),
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
        with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
            fsdp.shard(ONES, None)
        for layers, kind, text in [
            (["w"], TypeError, r"rank \d: layers: w is a ndarray, which is not callable"),
            (["v.*"], ValueError, r"rank \d: layers has 'v.\*', which matches no node"),
        ]:
            with pytest.raises(kind, match=text):
                fsdp.shard(ONES, mesh, layers=layers)

    run_ranks(program, 2)
