"""Prefixes have the bits of an all_reduce among the ranks that they are of."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import RankError, run_ranks
from transport._operands.prefixes import neutral, prefixes
from transport._operands.reduce_op import ReduceOp

OPS = {
    "SUM": "f4 f2 i8 ? c16",
    "PRODUCT": "f4 i2",
    "MIN": "f8 u1 ?",
    "MAX": "f2 i4",
    "BAND": "i4 u2 ?",
    "BOR": "i4 ?",
    "BXOR": "i8",
}


def contribution(rank, dtype, count):
    rng = np.random.default_rng([rank, count])
    return (rng.normal(size=count) * 10.0 ** (rank % 3) % 99).astype(dtype)


@pytest.mark.parametrize("backend", ["inproc", "tcp", "auto"])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_prefix_is_what_its_ranks_alone_reduce_to(backend, size):
    def program():
        rank = dist.get_rank()
        before = [dist.new_group(range(count)) for count in range(1, size + 1)]
        for name, dtypes in OPS.items():
            op = getattr(ReduceOp, name)
            for dtype in map(np.dtype, dtypes.split()):
                for count in (0, 1, 5, 3000):
                    x = contribution(rank, dtype, count)
                    sums = [group.all_reduce(x.copy(), op) for group in before[rank:]]
                    sent = np.empty((size, count), dtype)  # of each rank its own prefix
                    dist.all_gather_into_tensor(sent, sums[0])
                    expected = sent[rank]
                    got = dist.scan(x.copy(), op)
                    assert got.tobytes() == expected.tobytes(), (name, dtype, count)
                    out = dist.exscan(mine := x.copy(), op)
                    assert out is mine
                    last = sent[rank - 1] if rank else np.full(count, neutral(op, dtype), dtype)
                    assert out.tobytes() == last.tobytes(), (name, dtype, count)

    run_ranks(program, size, backend=backend)


def test_neutral_elements_change_nothing():
    for name, dtypes in OPS.items():
        op = getattr(ReduceOp, name)
        for dtype in map(np.dtype, dtypes.split()):
            x = contribution(3, dtype, 50)
            nothing = np.full_like(x, neutral(op, dtype))
            for pair in ((x, nothing), (nothing, x)):
                op.combine(*pair, out := np.empty_like(x))
                assert (out == x).all(), (name, dtype)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_prefixes_are_combined_as_the_tree_says(size):
    """In a free monoid: strings with their brackets."""

    class Brackets:
        def combine(self, lower, upper, out):
            for place in np.ndindex(out.shape):
                out[place] = f"({lower[place]}+{upper[place]})"

    def tree(ranks):
        if len(ranks) == 1:
            return str(ranks[0])
        half = 1 << (len(ranks) - 1).bit_length() - 1
        return f"({tree(ranks[:half])}+{tree(ranks[half:])})"

    rows = np.array([[str(rank)] for rank in range(size)], object)
    found = prefixes(Brackets(), rows)
    assert found[:, 0].tolist() == [tree(range(count)) for count in range(1, size + 1)]


def test_shapes_layouts_and_factors():
    def program():
        rank = dist.get_rank()
        matrix = np.arange(24.0).reshape(4, 6)[:, ::2]
        expected = matrix * (rank + 1)
        assert dist.scan(matrix) is matrix
        assert (matrix == expected).all()
        assert dist.scan(np.array(rank)) == rank * (rank + 1) // 2
        halves = dist.scan(np.ones(3, np.float16), dist.premul_sum(0.5))
        assert (halves == (rank + 1) / 2).all()
        each = dist.premul_sum(np.array([1.0, 2.0, 3.0]))
        assert dist.scan(np.ones(3), each).tolist() == [rank + 1, 2 * rank + 2, 3 * rank + 3]
        start = int(dist.exscan(np.array(10 + rank)))
        assert start == sum(10 + other for other in range(rank))
        return True

    assert all(run_ranks(program, 4))


def test_async_groups_and_meshes():
    def program():
        rank = dist.get_rank()
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("y", "x"))
        works = [mesh["x"].scan(np.ones(2), async_op=True), dist.exscan(np.ones(2), async_op=True)]
        assert works[0].result().tolist() == [1 + rank % 2] * 2
        assert works[1].result().tolist() == [rank] * 2
        assert dist.new_group([0, 1]).scan(np.ones(1)) == (None if rank > 1 else rank + 1)

    run_ranks(program, 4)


def test_jax_arrays_outside_and_inside_of_jit_agree():
    jax = pytest.importorskip("jax")
    from meshlib import jit

    def program():
        x = jax.numpy.asarray(contribution(dist.get_rank(), "f4", 100))
        eager, inside = dist.scan(x), jax.jit(jit.scan)(x)
        assert np.asarray(eager).tobytes() == np.asarray(inside).tobytes()

    run_ranks(program, 5)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: dist.exscan(np.ones(2)), "exscan"),
        (lambda: dist.scan(np.ones(2), ReduceOp.MAX), "MAX"),
        (lambda: dist.scan(np.ones(3)), "count=3"),
        (lambda: dist.scan(np.ones(2, np.float32)), "float32"),
        (lambda: dist.all_reduce(np.ones(2)), "all_reduce"),
    ],
)
def test_members_that_call_something_else(other, words):
    def program():
        with pytest.raises(dist.CollectiveMismatchError, match=words):
            other() if dist.get_rank() == 1 else dist.scan(np.ones(2))

    run_ranks(program, 3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: dist.scan(np.ones(1), ReduceOp.AVG), ValueError, "one that scan supports"),
        (lambda: dist.exscan(np.ones(1), ReduceOp.BOR), TypeError, "BOR"),
        (lambda: dist.scan(np.ones(1), "sum"), TypeError, "op must be a ReduceOp"),
        (lambda: dist.scan([1.0]), TypeError, "tensor"),
        (lambda: dist.exscan(np.ones(1), timeout=-1), ValueError, "timeout"),
    ],
)
def test_bad_input(call, error, words):
    def program():
        with pytest.raises(error, match=words):
            call()
        return dist.scan(np.ones(1))[0]  # the group stays usable

    assert run_ranks(program, 2) == [1, 2]


def test_a_missing_member_is_named():
    def program():
        if dist.get_rank() == 0:
            dist.scan(np.ones(1), timeout=0.3)

    with pytest.raises(RankError) as caught:
        run_ranks(program, 2)
    assert "rank 1" in str(caught.value)
