"""The program that tests start under mpirun: one function a case, chosen by the first argument."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT)]

import numpy as np  # noqa: E402
import pytest  # noqa: E402

import meshlib as dist  # noqa: E402
from tests.support.meshlib.array_oracle import (  # noqa: E402
    DTYPES,
    MOVES,
    REDUCTIONS,
    Spec,
    expect,
    perform,
    same,
)

SHAPES = [(3,), (2, 3), (0,), (7,), (3000,)]
SOME_DTYPES = [np.dtype("f4"), np.dtype("c16"), np.dtype("i1"), DTYPES[-9]]


def collectives() -> None:
    """Every collective, waited for and not, small and large, against the oracle."""
    dist.init_process_group("mpi", timeout=60)
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == "mpi"
    kinds = (*REDUCTIONS, *MOVES)
    cases = [
        Spec(kind, dtype, SHAPES[i % 5], root=i, seed=i)
        for i, (kind, dtype) in enumerate((k, d) for d in SOME_DTYPES for k in kinds)
    ]
    cases += [Spec(kind, np.dtype("f4"), (60_001,), root=i) for i, kind in enumerate(kinds)]
    for async_op in (False, True):
        handles = [perform(spec, dist.group.WORLD, async_op) for spec in cases]
        for spec, handle in zip(cases, handles, strict=True):
            got = handle.result() if isinstance(handle, dist.Work) else handle
            assert same(got, expect(spec, size)[rank]), spec
    for count in (3, 60_001, 2_000_000):
        inputs = [np.random.default_rng(i).random(count, np.float32) for i in range(size)]
        own = [inputs[rank].copy() for _ in range(3)]
        for work in [dist.all_reduce(each, async_op=True) for each in own]:
            work.wait()
        while len(inputs) > 1:  # by the tree of docs/inside/algorithms.md
            pairs = [inputs[i : i + 2] for i in range(0, len(inputs), 2)]
            inputs = [pair[0] + pair[1] if len(pair) > 1 else pair[0] for pair in pairs]
        assert all((each == inputs[0]).all() for each in own), count


def groups_and_messages() -> None:
    """Groups of some, messages from anybody, tags out of order, large ones in both directions."""
    dist.init_process_group("mpi", timeout=60)
    rank, size = dist.get_rank(), dist.get_world_size()
    # Groups are made by their members alone: the others do not even look.
    if rank != 1:
        some = dist.new_group([r for r in range(size) if r != 1])
        assert dist.all_reduce(np.ones(1), group=some)[0] == size - 1
    box = np.zeros(1)
    if rank == 0:
        assert {dist.recv(box) for _ in range(size - 1)} == set(range(1, size))
    else:
        dist.send(np.ones(1), 0)
    last, first = np.zeros(1), np.zeros(1)
    peer, before = (rank + 1) % size, (rank - 1) % size
    dist.isend(np.full(1, 1.0), peer, tag=2**32 - 1)
    dist.isend(np.full(1, 2.0), peer, tag=5)
    dist.recv(last, before, tag=5)
    dist.recv(first, before, tag=2**32 - 1)
    assert (last[0], first[0]) == (2.0, 1.0)
    large, room = np.full(2 << 20, float(rank)), np.zeros(2 << 20)
    ops = [dist.P2POp(dist.isend, large, peer), dist.P2POp(dist.irecv, room, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (room == before).all()
    dist.isend(np.full(1, 9.0), rank)
    assert dist.irecv(box, rank).result()[0] == 9.0
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("cpu:mpi", world_size=size)
    assert dist.all_reduce(np.ones(1))[0] == size


def wrong_place() -> None:
    """A rank that is not MPI's is refused."""
    with pytest.raises(ValueError, match="world_size is 77, but MPI assigned another"):
        dist.init_process_group("mpi", world_size=77, timeout=30)


def mismatch() -> None:
    """Ranks that disagree all raise, and end."""
    dist.init_process_group("mpi", timeout=30)
    dist.all_reduce(np.ones(1 + (dist.get_rank() == 1)))
    dist.barrier()


def late() -> None:
    """A rank that does not come is named by the others."""
    dist.init_process_group("mpi", timeout=30)
    if dist.get_rank() == 1:
        import time

        time.sleep(2.5)
        return
    dist.group.WORLD.all_reduce(np.ones(5), timeout=0.5)


def raises() -> None:
    """One rank raises while the others wait for it."""
    dist.init_process_group("mpi", timeout=30)
    if dist.get_rank() == 1:
        raise RuntimeError("out of luck")
    dist.all_reduce(np.ones(1 << 20))


def unreceived() -> None:
    """A large message that nobody takes: the send ends at its deadline, and so does the job."""
    dist.init_process_group("mpi", timeout=30)
    if dist.get_rank() == 0:
        dist.group.WORLD.send(np.ones(4 << 20), 1, timeout=0.5)
    time.sleep(2.0)  # who has left is told apart from who does not receive


def messages_before_leaving() -> None:
    """Small messages whose sender is gone before they are asked for."""
    for _ in range(5):
        dist.init_process_group("mpi", timeout=20)
        rank, size = dist.get_rank(), dist.get_world_size()
        box = np.zeros(1)
        if rank == size - 1:
            for source in range(size - 1):
                dist.recv(box, source)
                assert box[0] == source
        else:
            dist.send(np.full(1, float(rank)), size - 1)
        dist.destroy_process_group()


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        *(collectives, groups_and_messages, messages_before_leaving),
        *(wrong_place, mismatch, late, raises, unreceived),
    )
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
    print("rank ended well", flush=True)
