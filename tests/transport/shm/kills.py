"""Kills a rank at a random moment inside a call, many times: ``python kills.py ROUNDS [SEED]``.

Each round forks three ranks that make calls of 8 bytes to 64 MiB in shared memory, and kills one.
The others must raise an error that names it within a second, and nothing may be left behind.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.transport.rank_threads import Member
from transport._calls.header import Kind
from transport._communicators.runtime import Membership, Runtime
from transport._errors import PeerLostError
from transport._operands.reduce_op import ReduceOp
from transport._shm import ShmCommunicator
from transport._store.file.store import FileStore

SIZE = 3
WITHIN = 1.0
"""Seconds from a kill until a survivor knows who was killed."""


def make_call(member: Member, rng: random.Random) -> None:
    """Make a call, of which all ranks draw the same."""
    count = 2 ** rng.randrange(1, 25)
    kind = rng.choice((Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST, Kind.REDUCE, Kind.SEND))
    root = rng.randrange(SIZE)
    x: Any = np.ones(count, rng.choice((np.float32, np.float16)))
    comm = member.comm
    if kind is Kind.ALL_REDUCE:
        member.all_reduce(x, ReduceOp.SUM)
    elif kind is Kind.ALL_GATHER:
        part = x[: count // SIZE + 1]
        outputs = [np.empty_like(part) for _ in range(SIZE)]
        comm.all_gather(member.call(kind, x.dtype), outputs, part)
    elif kind is Kind.BROADCAST:
        comm.broadcast(member.call(kind, x.dtype, count, root=root), x, root)
    elif kind is Kind.REDUCE:
        comm.reduce(
            member.call(kind, x.dtype, count, ReduceOp.SUM, root=root), x, ReduceOp.SUM, root
        )
    elif member.rank == root:
        member.send(x, (root + 1) % SIZE)
    elif member.rank == (root + 1) % SIZE:
        member.recv(x, root)


def be_rank(rank: int, path: str, seed: int, ready: int) -> None:
    """Make calls until a peer is lost; write who that is, and when it was known."""
    runtime = Runtime(b"secret")
    store = FileStore(path, SIZE)
    comm = ShmCommunicator(Membership("group", rank, tuple(range(SIZE)), store, runtime))
    member, rng = Member(comm), random.Random(seed)
    member.barrier()
    os.write(ready, b"r")
    try:
        while True:
            make_call(member, rng)
    except PeerLostError as error:
        known = time.monotonic()
        comm.abort(str(error))  # the others may wait for this one, which goes on no more
        os.write(ready, f"{known} {error}".encode())
        signal.pause()


def kill_one(seed: int) -> list[float]:
    """Return the seconds that the survivors took. Raises AssertionError where one does not know."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [os.pipe() for _ in range(SIZE)]
        pids: list[int] = []
        for rank, (_, ready) in enumerate(pipes):
            pid = os.fork()
            if not pid:
                try:
                    be_rank(rank, str(Path(folder, "store")), seed, ready)
                finally:
                    os._exit(0)
            pids.append(pid)
        try:
            for read, _ in pipes:
                assert read_within(read, 1, 60) == b"r"
            time.sleep(rng.random() * 0.1)
            victim = rng.randrange(SIZE)
            os.kill(pids[victim], signal.SIGKILL)
            killed = time.monotonic()
            took: list[float] = []
            for rank, (read, _) in enumerate(pipes):
                if rank != victim:
                    known, report = read_within(read, 4096, 60).decode().split(" ", 1)
                    assert f"rank {victim}" in report, f"seed {seed}: rank {rank} reported {report}"
                    took.append(float(known) - killed)
            return took
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            for pipe in pipes:
                for fd in pipe:
                    os.close(fd)


def read_within(fd: int, count: int, seconds: float) -> bytes:
    assert select.select([fd], [], [], seconds)[0], f"no word within {seconds} s"
    return os.read(fd, count)


def main() -> None:
    rounds, first = int(sys.argv[1]), int((*sys.argv, 1)[2])
    took = [seconds for seed in range(first, first + rounds) for seconds in kill_one(seed)]
    late = sum(seconds > WITHIN for seconds in took)
    middle, most = sorted(took)[len(took) // 2], max(took)
    print(
        f"{rounds} kills, {len(took)} survivors: median {middle:.3f} s, most {most:.3f},"
        f" {late} late"
    )


if __name__ == "__main__":
    main()
