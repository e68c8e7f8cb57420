"""Names that PyTorch 2.13 to 2.15 have added or changed."""

from datetime import timedelta

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks


@pytest.mark.parametrize("name", ["gather_single", "gather_into_tensor"])
@pytest.mark.parametrize("shape", [(6,), (3, 2)])
def test_a_gather_into_one_array(name, shape):
    def program():
        rank = dist.get_rank()
        whole = np.empty(shape, np.int32) if rank == 1 else None
        got = getattr(dist, name)(np.full(2, rank, np.int32), whole, dst=1)
        assert got is whole
        group = dist.new_group([0, 2])
        outs = np.empty(2) if rank == 2 else None
        work = getattr(group, name)(np.array([1.0 + rank]), outs, group_dst=1, async_op=True)
        inside = None if work is None else work.result()
        return got, inside

    results = run_ranks(program, 3)
    assert results[0] == (None, None)
    assert results[1][0].ravel().tolist() == [0, 0, 1, 1, 2, 2]
    assert results[2][1].tolist() == [1, 3]


def test_own_part_in_place_and_jax_arrays():
    jnp = pytest.importorskip("jax.numpy")

    def program():
        rank = dist.get_rank()
        whole = np.full(4, rank + 1.0)
        dist.gather_single(whole[:2], whole if rank == 0 else None)
        out = dist.gather_single(jnp.ones(1) * rank, jnp.zeros(2) if rank == 0 else None)
        return whole.tolist(), None if out is None else np.asarray(out).tolist()

    assert run_ranks(program, 2)[0] == ([1, 1, 2, 2], [0, 1])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: dist.gather_single(np.ones(2), np.ones(3)), ValueError, "2 members times"),
        (lambda: dist.gather_single(np.ones(1)), ValueError, "gather_tensor is None"),
        (lambda: dist.gather_single(np.ones(1), np.ones(2, "f4")), TypeError, "float32"),
        (lambda: dist.gather_single(np.ones(1), np.ones(2), dst=1), ValueError, "not the dest"),
        (lambda: dist.gather_single((x := np.ones(4))[1:3], x), ValueError, "overlaps"),
        (lambda: dist.set_timeout(-1), ValueError, "timeout"),
        (lambda: dist.set_timeout(None), TypeError, "timeout"),
    ],
)
def test_bad_input(call, error, words):
    def program():
        if dist.get_rank() == 0:
            with pytest.raises(error, match=words):
                call()

    run_ranks(program, 2)


def test_sizes_that_differ_are_a_mismatch():
    def program():
        rank = dist.get_rank()

        def calls():
            dist.gather_single(np.ones(1 + rank), np.ones(2) if rank == 0 else None)
            dist.barrier()  # the sender does not wait for the destination

        with pytest.raises(dist.CollectiveMismatchError, match="count=2"):
            calls()

    run_ranks(program, 2)


def test_set_timeout():
    def program():
        group = dist.new_group()
        dist.set_timeout("20s", group)
        dist.set_timeout(timedelta(seconds=30))
        return group.timeout, dist.group.WORLD.timeout

    assert run_ranks(program, 2) == [(timedelta(seconds=20), timedelta(seconds=30))] * 2
