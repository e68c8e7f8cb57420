"""JAX arrays: never changed, the result is what the call returns."""

import array

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")


def test_every_collective_by_its_result():
    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        x = jnp.full((2, 2), rank + 1.0)

        def boxes():
            return [jnp.zeros((2, 2)) for _ in range(size)]

        parts = [jnp.full(2, 10.0 * i + rank) for i in range(size)]
        half = jnp.arange(4.0, dtype=jnp.bfloat16)
        results = {
            "all_reduce": dist.all_reduce(x),
            "bfloat16": dist.all_reduce(half, dist.ReduceOp.AVG),
            "reduce": dist.reduce(x, dst=1),
            "broadcast": dist.broadcast(x, src=1),
            "all_gather": dist.all_gather(boxes(), x),
            "into": dist.all_gather_into_tensor(jnp.zeros((size, 2, 2)), x),
            "gather": dist.gather(x, boxes() if rank == 0 else None, dst=0),
            "scatter": dist.scatter(jnp.zeros(2), parts if rank == 0 else None, src=0),
            "reduce_scatter": dist.reduce_scatter(jnp.zeros(2), parts),
            "rs_tensor": dist.reduce_scatter_tensor(jnp.zeros(2), jnp.arange(2.0 * size)),
            "all_to_all": dist.all_to_all([jnp.zeros(2) for _ in range(size)], parts),
            "single": dist.all_to_all_single(jnp.zeros(size), jnp.arange(size) + 10.0 * rank),
            "coalesced": dist.all_reduce_coalesced([x, jnp.ones(3)]),
            "async": dist.all_reduce(x, async_op=True).result(),
        }
        for name, result in results.items():
            leaves = jax.tree.leaves(result)
            assert all(isinstance(leaf, jax.Array) for leaf in leaves), name
        assert (x == rank + 1).all()  # the argument is what it was
        return jax.tree.map(np.asarray, results)

    for rank, got in enumerate(run_ranks(program, 2)):
        assert (got["all_reduce"] == 3).all()
        assert got["all_reduce"].shape == (2, 2)
        assert got["bfloat16"].dtype.name == "bfloat16"
        assert got["bfloat16"].tolist() == [0, 1, 2, 3]
        assert (got["reduce"] == (3 if rank == 1 else 1)).all()
        assert (got["broadcast"] == 2).all()
        assert [x[0, 0] for x in got["all_gather"]] == [1, 2]
        assert got["into"][:, 0, 0].tolist() == [1, 2]
        assert (got["gather"] is None) == (rank == 1)
        assert (got["scatter"] == 10 * rank).all()
        assert (got["reduce_scatter"] == 20 * rank + 1).all()
        assert got["rs_tensor"].tolist() == [4.0 * rank, 4.0 * rank + 2]
        assert [x[0] for x in got["all_to_all"]] == [10 * rank, 10 * rank + 1]
        assert got["single"].tolist() == [rank, 10 + rank]
        assert (got["coalesced"][1] == 2).all()
        assert (got["async"] == 3).all()


def test_messages():
    def program():
        rank = dist.get_rank()
        dist.isend(jnp.full(3, rank + 1), 1 - rank)
        return np.asarray(dist.irecv(jnp.zeros(3, int), 1 - rank).result()).tolist()

    assert run_ranks(program, 2) == [[2] * 3, [1] * 3]


def test_jax_and_numpy_in_one_call():
    def program():
        x = np.ones(3, np.float32)
        return dist.all_reduce(x if dist.get_rank() else jnp.ones(3))

    assert [np.asarray(x).tolist() for x in run_ranks(program, 2)] == [[2.0] * 3] * 2


def test_a_traced_array_is_refused():
    def program():
        with pytest.raises(TypeError, match=r"tensor is traced by jax\.jit .* meshlib\.jit"):
            jax.jit(dist.all_reduce)(jnp.ones(2))
        return dist.all_reduce(array.array("d", [1.0]))[0]

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_results_are_put_where_the_user_put_the_operand_and_else_nowhere():
    def body():
        x = jnp.ones(2)
        placed = jax.device_put(x, jax.devices()[0])
        return dist.all_reduce(x).committed, dist.all_reduce(placed).committed

    assert run_ranks(body, 2) == [(False, True)] * 2
