"""Many mixed calls, and the memory of each process meanwhile: it must not grow with their number.

    meshrun --start exec --nproc-per-node 2 tests/benchmarks/soak.py [--backend tcp]
            [--calls 112500] [--seconds 300] [--largest 4194304]

It ends with the calls or the seconds, whichever are first. Of each tenth of the way it prints the
greatest resident memory of a process, in MiB, and the number of its threads. Each of three groups
makes all kinds of calls, also asynchronous ones at once, of 8 bytes to ``--largest``. With
``MALLOC_ARENA_MAX=1`` in the environment glibc keeps no memory apart for each thread.
"""

import argparse
import threading
from time import perf_counter

import numpy as np

import meshlib as dist

EVERY = 250


def resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="tcp")
    parser.add_argument("--calls", type=int, default=112_500)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--largest", type=int, default=4 << 20)
    given = parser.parse_args()
    dist.init_process_group(given.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    rng = np.random.default_rng(0)  # the same sizes on all ranks
    begin, made, reported = perf_counter(), 0, 0.0
    while made < given.calls:
        for _ in range(EVERY):
            count = int(2 ** rng.uniform(0, np.log2(given.largest / 8)))
            call(made % 6, groups, made % 3, count, rank, size)
            made += 1
        way = max(made / given.calls, (perf_counter() - begin) / given.seconds)
        state = np.array([resident(), threading.active_count(), way])
        most = dist.all_reduce(state, dist.ReduceOp.MAX)
        if rank == 0 and (most[2] >= reported + 0.1 or most[2] >= 1):
            reported = most[2]
            print(f"{made:7} calls: {most[0]:6.0f} MiB, {most[1]:.0f} threads", flush=True)
        if most[2] >= 1:
            break
    dist.destroy_process_group()


def call(
    kind: int, groups: list[dist.ProcessGroup], place: int, count: int, rank: int, size: int
) -> None:
    group, x = groups[place], np.ones(count)
    if kind == 0:
        dist.all_reduce(x, group=group)
    elif kind == 1:
        works = [dist.all_reduce(np.ones(count), group=g, async_op=True) for g in groups]
        for work in works:
            work.wait()
    elif kind == 2:
        dist.all_gather_into_tensor(np.empty(size * count), x, group=group)
    elif kind == 3:
        sent = dist.isend(x, (rank + 1) % size)
        dist.recv(np.empty(count), (rank - 1) % size)
        assert sent is not None  # this rank is a member
        sent.wait()
    elif kind == 4:
        dist.broadcast(x, 0, group=group)
    else:
        dist.all_to_all_single(np.empty(size * count), np.ones(size * count), group=group)


main()
