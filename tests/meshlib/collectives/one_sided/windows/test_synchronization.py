"""Signals and locks of a window."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as dist
from tests.support.meshlib.windows import DEADLINE, everywhere, run, world


@everywhere
def test_a_signal_arrives_after_earlier_puts(backend: str) -> None:
    rounds, count = 40, 5000

    def program() -> None:
        group, rank, size = world()
        left, right = (rank - 1) % size, (rank + 1) % size
        with group.window(np.zeros((2, count), np.int32)) as window:
            for i in range(1, rounds + 1):
                window.put(np.full(count, i, np.int32), right, (i % 2) * count)
                window.signal(right)
                window.wait_signal(left)
                assert (window.array[i % 2] == i).all()
                # The left one may overwrite it two rounds later: after it got this rank's signal.
                window.signal(left)
                window.wait_signal(right)

    run(program, backend)


@everywhere
def test_signals_of_ranks_are_counted_apart(backend: str) -> None:
    def program() -> None:
        group, rank, _ = world()
        with group.window(np.zeros(1)) as window:
            for _ in range(rank):
                window.signal(0)
            window.signal(rank)
            if rank == 0:
                for src in (2, 3, 1, 2, 3, 3):
                    window.wait_signal(src)
                with pytest.raises(dist.CollectiveTimeoutError, match="rank 3 has sent no signal"):
                    window.wait_signal(3, timeout=0.01)
            window.wait_signal(rank)

    run(program, backend)


@everywhere
def test_a_lock_keeps_the_others_off(backend: str) -> None:
    rounds = 15

    def program() -> None:
        group, _, size = world()
        with group.window(np.zeros(3, np.int64)) as window:
            for _ in range(rounds):
                with window.lock(1):
                    window.put(window.get(1, 2, 1) + 1, 1, 2)
            with window.lock(1, shared=True):
                window.get(1)
            window.fence()
            assert window.get(1)[2] == rounds * size

    run(program, backend)


@everywhere
def test_many_share_a_lock_and_one_has_it_alone(backend: str) -> None:
    def program() -> None:
        group, rank, size = world()
        with group.window(np.zeros(1)) as window:
            with window.lock(0, shared=True):
                group.barrier()  # all have it
                late = pytest.raises(
                    dist.CollectiveTimeoutError, match=f"lock back from {size} ranks"
                )
                with late, window.lock(0, timeout=1.0):
                    pass
                group.barrier()
            group.barrier()
            if rank == 1:
                with window.lock(0):
                    group.barrier()
                    group.barrier()
            else:
                group.barrier()
                late = pytest.raises(
                    dist.CollectiveTimeoutError, match="rank 1 did not release the lock of rank 0"
                )
                with late, window.lock(0, shared=True, timeout=1.0):
                    pass
                group.barrier()
            with window.lock(0):
                pass

    run(program, backend)


@everywhere
def test_a_block_that_raises_gives_its_lock_back(backend: str) -> None:
    def program() -> None:
        group, rank, _ = world()
        with group.window(np.zeros(1)) as window:
            if rank == 1:
                with pytest.raises(KeyError), window.lock(0):
                    raise KeyError
                window.signal(0)
            if rank == 0:
                window.wait_signal(1)
                with window.lock(0, timeout=DEADLINE):
                    pass

    run(program, backend, 2)
