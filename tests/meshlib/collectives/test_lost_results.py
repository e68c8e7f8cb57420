"""No result is lost in silence: it is where the caller said, in the caller's list, or returned.

Else the call raises before anything is sent.
"""

import array
import gc
import time
import warnings

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

jnp = pytest.importorskip("jax.numpy")

READ_ONLY = np.broadcast_to(1.0, 2)
IMMUTABLE = {
    "JAX": lambda: jnp.zeros(2),
    "a NumPy scalar": lambda: np.float64(0),
}
UNWRITABLE = {
    "a read-only NumPy array": lambda: READ_ONLY,
    "bytes": lambda: bytes(16),
    "a read-only buffer": lambda: memoryview(array.array("d", [0, 0])).toreadonly(),
}


@pytest.mark.parametrize("kind", IMMUTABLE)
def test_recv_refuses_what_it_can_neither_fill_nor_return(kind):
    def program():
        x = np.ones_like(IMMUTABLE[kind]())
        if dist.get_rank() == 0:
            dist.send(x, 1)
        else:
            with pytest.raises(
                TypeError, match=r"cannot be written to; .* irecv\(\.\.\.\)\.result"
            ):
                dist.recv(IMMUTABLE[kind](), src=0)
            # Nothing was received: the message is still there.
            assert np.all(dist.irecv(IMMUTABLE[kind](), src=0).result() == 1)
        return float(dist.all_reduce(np.ones(1))[0])

    assert run_ranks(program, 2) == [2.0, 2.0]


WRITING = {
    "recv": lambda out: dist.recv(out, src=0),
    "irecv": lambda out: dist.irecv(out, src=0),
    "batch": lambda out: dist.batch_isend_irecv([dist.P2POp(dist.irecv, out, 0)]),
    "broadcast": lambda out: dist.broadcast(out, src=1 - dist.get_rank()),
    "all_reduce": dist.all_reduce,
    "all_gather": lambda out: dist.all_gather([out, np.zeros(2)], np.ones(2)),
    "gather": lambda out: dist.gather(np.ones(2), [out, np.zeros(2)], dst=dist.get_rank()),
    "scatter": lambda out: dist.scatter(out, np.ones((2, 2)), src=dist.get_rank()),
    "reduce_scatter": lambda out: dist.reduce_scatter(out, np.ones((2, 2))),
    "all_to_all": lambda out: dist.all_to_all([out, np.zeros(2)], np.ones((2, 2))),
    "all_reduce_coalesced": lambda out: dist.all_reduce_coalesced([np.zeros(2), out]),
}


@pytest.mark.parametrize("call", WRITING)
@pytest.mark.parametrize("kind", UNWRITABLE)
def test_outputs_that_are_read_only_are_refused(call, kind):
    def program():
        with pytest.raises(TypeError, match=r"is a read-only array \(shape .*expected a writable"):
            WRITING[call](UNWRITABLE[kind]())
        return float(dist.all_reduce(np.ones(1))[0])

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_lists_are_filled_where_their_arrays_cannot_be():
    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        x = jnp.full(2, rank + 1.0)

        def boxes():
            return [jnp.zeros(2) for _ in range(size)]

        gathered, collected, exchanged, later = boxes(), boxes(), boxes(), boxes()
        returned = dist.all_gather(gathered, x)
        assert all(a is b for a, b in zip(returned, gathered, strict=True))
        dist.gather(x, collected if rank == 0 else None, dst=0)
        dist.all_to_all(exchanged, [x + 10 * i for i in range(size)])
        dist.all_gather(later, x, async_op=True).wait()
        several = [x, jnp.ones(3)]
        dist.all_reduce_coalesced(several)
        nested = [[jnp.zeros(2)] for _ in range(size)]
        dist.all_gather_coalesced(nested, [x])
        into, parts = [jnp.zeros((size, 2))], [jnp.zeros(1)]
        dist.all_gather_into_tensor_coalesced(into, [x])
        dist.reduce_scatter_tensor_coalesced(parts, [x])
        mixed = [np.zeros(2, np.float32), jnp.zeros(2)]
        first = mixed[0]
        dist.all_gather(mixed, x)
        assert mixed[0] is first
        lists = gathered, collected, exchanged, later, several, [row[0] for row in nested], mixed
        return [[float(box[0]) for box in each] for each in lists] + [
            into[0][:, 0].tolist(),
            parts[0].tolist(),
        ]

    for rank, got in enumerate(run_ranks(program, 2)):
        assert got[0] == got[3] == got[5] == got[6] == got[7] == [1, 2]
        assert got[1] == ([1, 2] if rank == 0 else [0, 0])
        assert got[2] == [1 + 10 * rank, 2 + 10 * rank]
        assert got[4] == [3, 2]
        assert got[8] == [3]


def test_a_batch_has_what_it_received():
    def program():
        rank = dist.get_rank()
        sent = dist.P2POp(dist.isend, jnp.full(2, rank + 1.0), 1 - rank)
        received = dist.P2POp(dist.irecv, jnp.zeros(2), 1 - rank)
        for work in dist.batch_isend_irecv([received, sent]):
            work.wait()
        return float(sent.tensor[0]), float(received.tensor[0])

    assert run_ranks(program, 2) == [(1, 2), (2, 1)]


def test_an_array_is_a_list_along_its_first_axis():
    def program():
        rank = dist.get_rank()
        x = np.full(3, rank + 1.0)
        rows = np.zeros((2, 3))
        dist.all_gather(rows, x)
        mine = dist.scatter(np.zeros(3), rows * 10 if rank == 0 else None, src=0)
        numbers = np.zeros(2)
        dist.all_to_all(numbers, np.array([10.0, 20.0]) + rank)
        from_jax = dist.reduce_scatter(np.zeros(3, np.float32), jnp.ones((2, 3)))
        return rows.tolist(), mine.tolist(), numbers.tolist(), from_jax.tolist()

    for rank, (rows, mine, numbers, from_jax) in enumerate(run_ranks(program, 2)):
        assert rows == [[1.0] * 3, [2.0] * 3]
        assert mine == [10.0 * (rank + 1)] * 3
        assert numbers == [10.0 * (rank + 1), 10.0 * (rank + 1) + 1]
        assert from_jax == [2.0] * 3


# ---------------------------------------------------------------------- results that nobody takes


def _warnings_of(program, size=2):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", dist.ResultIgnoredWarning)
        results = run_ranks(program, size)
        deadline = time.monotonic() + 30
        while not results[0] and not seen and time.monotonic() < deadline:
            gc.collect()  # the thread of a call may release its result a little later
            time.sleep(0.01)
    assert all(w.category is dist.ResultIgnoredWarning for w in seen)
    return seen


def drops_the_sum():
    dist.all_reduce(jnp.ones(2))


def drops_the_sum_of_a_method():
    dist.group.WORLD.all_reduce(np.float64(1))


def drops_a_list_that_cannot_be_filled():
    dist.all_gather((jnp.ones(2), jnp.ones(2)), jnp.ones(2))


def waits_and_takes_nothing():
    work = dist.all_reduce(jnp.ones(2), async_op=True)
    work.wait()


def receives_and_takes_nothing():
    dist.send(jnp.ones(2), dist.get_rank())
    dist.irecv(jnp.zeros(2), dist.get_rank()).wait()


@pytest.mark.parametrize(
    "program",
    [
        drops_the_sum,
        drops_the_sum_of_a_method,
        drops_a_list_that_cannot_be_filled,
        waits_and_takes_nothing,
        receives_and_takes_nothing,
    ],
)
def test_a_result_that_nobody_takes_is_told(program):
    seen = _warnings_of(program)
    assert seen
    place = f"{seen[0].filename}:{seen[0].lineno} {seen[0].message}"
    assert f"{__file__}:{program.__code__.co_firstlineno + 1}" in place or (
        f"{__file__}:{program.__code__.co_firstlineno + 2}" in place
    )


def test_a_line_is_told_of_once():
    def program():
        for _ in range(3):
            dist.all_reduce(jnp.ones(2))

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default", dist.ResultIgnoredWarning)
        run_ranks(program, 1)
    assert len(seen) == 1


def test_results_that_are_taken_are_not_told_of():
    def program():
        x = jnp.ones(2)
        x = dist.all_reduce(x)
        total = float(dist.all_reduce(x).sum())
        _ = dist.broadcast(x, 0)
        by_result = dist.all_reduce(x, async_op=True).result()
        then = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value())
        boxes = [jnp.zeros(2) for _ in range(dist.get_world_size())]
        dist.all_gather(boxes, x)
        dist.all_gather(boxes, x, async_op=True).wait()
        dist.all_reduce(np.ones(2))
        dist.all_reduce(np.ones(2), async_op=True).wait()
        dist.reduce(np.ones((2, 2))[:, 0], dst=0)
        dist.barrier()
        return [total, by_result, then.wait()]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(program, 2)
        gc.collect()
