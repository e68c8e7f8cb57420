"""Static fields of pytree nodes, which JAX compares while other ranks' threads run."""

import pickle
import sys
import types

import jax
import numpy as np
import pytest

import meshlib as dist
from meshlib.extend import mesh_key
from meshlib.testing import run_ranks
from parallel import ColwiseParallel, RowwiseParallel
from parallel.jax import fsdp, parallelize
from parallel.jax._static import Static


def trees():
    """Return two trees with a node of each kind, made apart on equal meshes."""

    def make():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        params = {"up": np.ones((4, 6)), "down": np.ones((6, 4)), "bias": np.ones(4)}
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "bias": RowwiseParallel()}
        return fsdp.shard(parallelize(params, mesh["tp"], plan), mesh["dp_shard"])

    return make(), make()


def static_fields(structure):
    """Return the static fields of all nodes of a tree."""
    found = [structure.node_data()[1]] if structure.node_data() else []
    return found + [field for child in structure.children() for field in static_fields(child)]


def runs_python(value):
    """Return whether comparing or hashing ``value`` runs Python code."""
    if isinstance(value, tuple | list):
        return any(map(runs_python, value)) or runs_python(type(value))
    kind = value if isinstance(value, type) else type(value)
    return isinstance(kind.__eq__, types.FunctionType) or isinstance(
        kind.__hash__, types.FunctionType
    )


def test_a_comparison_runs_no_python():
    def program():
        first, second = map(jax.tree_util.tree_structure, trees())
        assert first == second
        assert hash(first) == hash(second)
        fields = static_fields(first)
        assert sum(isinstance(field, Static) for field in fields) >= 4
        return [field for field in fields if runs_python(field)]

    assert run_ranks(program, 4) == [[]] * 4


def test_different_fields_differ():
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        other = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        nodes = [
            fsdp.ShardedArray(1.0, fsdp.Split(mesh, 0, 4)),
            fsdp.ShardedArray(1.0, fsdp.Split(other, 0, 4)),
            fsdp.ShardedArray(1.0, fsdp.Split(mesh, None, 4)),
            fsdp.ShardedArray(1.0, fsdp.Split(mesh, 0, 5)),
            fsdp.ShardedArray(1.0, fsdp.Split(mesh, 0, 4, np.dtype("float32"))),
            fsdp.ShardedArray(1.0, fsdp.Split(mesh, 0, 4, None, np.dtype("float32"))),
        ]
        assert len(set(map(jax.tree_util.tree_structure, nodes))) == len(nodes)
        for node in nodes:
            again = pickle.loads(pickle.dumps(node))
            assert jax.tree_util.tree_structure(again) == jax.tree_util.tree_structure(node)
            (path, leaf), _ = jax.tree_util.tree_flatten_with_path(node)[0][0], None
            assert (jax.tree_util.keystr(path), leaf) == (".array", 1.0)

    run_ranks(program, 2)


def test_equal_meshes_are_equal_however_their_ranks_are_numbered():
    def program():
        whole = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        apart = dist.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
        pairs = [(whole, apart), (whole["a"], apart["a"]), (whole["a"], whole["b"])]
        for one, other in pairs:
            assert (mesh_key(one) == mesh_key(other)) is (one == other)

    run_ranks(program, 4)


@pytest.fixture
def quick_switches():
    """Have Python change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_rank_threads_share_a_program_cache():
    """With a comparison that runs Python code, this crashes in every third run."""

    def program():
        mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        for length in range(1, 40):
            parts = fsdp.shard({"w": np.ones((length, 2))}, mesh, init_sync=False)
            assert jax.jit(fsdp.gather)(parts)["w"].shape == (length, 2)

    run_ranks(program, 4)
