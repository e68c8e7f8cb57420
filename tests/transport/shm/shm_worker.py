"""One rank of a group of real processes, for the tests of shared memory.

``python shm_worker.py RANK SIZE PORT SCENARIO``; prints one line of JSON. A scenario is a function
here; what it returns is printed.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.transport.rank_threads import Member
from transport._calls.header import Kind
from transport._communicators.runtime import Membership, Runtime
from transport._errors import CommunicatorTimeoutError, PeerLostError
from transport._operands.reduce_op import ReduceOp
from transport._shm import ShmCommunicator
from transport._store.tcp.store import TCPStore

MIB = 1 << 20
VICTIM = 1


def holdings() -> dict[str, int]:
    """How many descriptors, mappings and threads of ours this process has."""
    links: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the listing's own
    return {
        "memory": sum("meshlib" in link for link in links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "maps": Path("/proc/self/maps").read_text().count("meshlib"),
        "threads": threading.active_count(),
    }


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def survive(member: Member, call: Callable[[], Any]) -> dict[str, Any]:
    """Make a call during which the victim dies; return which peer it missed."""
    try:
        call()
    except PeerLostError as error:
        return {"lost": error.peer}
    return {"lost": None}


def values(member: Member) -> dict[str, Any]:
    """Large and small calls of all sorts between processes, with and without symmetric memory."""
    n, rank = member.size, member.rank
    for count in (1, 3000, 700_001):
        wanted = np.arange(count, dtype=np.float64) * n + sum(range(n))
        private = np.arange(count, dtype=np.float64) + rank
        symmetric = member.comm.allocate(
            member.call(Kind.ALLOCATE, np.float64, count), count, np.dtype(np.float64)
        )
        for array in (private, symmetric):
            array[:] = np.arange(count) + rank
            member.all_reduce(array, ReduceOp.SUM)
            assert np.array_equal(array, wanted)
            outputs = [np.empty(count) for _ in range(n)]
            array[:] = rank
            member.comm.all_gather(member.call(Kind.ALL_GATHER, array.dtype), outputs, array)
            assert all((outputs[r] == r).all() for r in range(n))
            call = member.call(Kind.BROADCAST, array.dtype, count, root=n - 1)
            member.comm.broadcast(call, array, n - 1)
            assert (array == n - 1).all()
        to, source = (rank + 1) % n, (rank - 1) % n
        sender = threading.Thread(target=member.send, args=(np.full(count, rank, np.int32), to))
        sender.start()
        got = np.empty(count, np.int32)
        assert member.recv(got, None) == source
        assert (got == source).all()
        sender.join()
        member.barrier()
    return {}


def memory(member: Member) -> dict[str, Any]:
    """The memory that a group takes beside the arrays, in bytes, with every part of it used."""
    array = np.ones(8 * MIB, np.float32)

    def use(count: int) -> None:
        part = array[:count]
        member.all_reduce(part, ReduceOp.SUM)
        if member.rank == 0:
            for peer in range(1, member.size):
                member.send(part, peer)
        else:
            member.recv(part, 0)
        member.comm.broadcast(member.call(Kind.BROADCAST, part.dtype, count, root=0), part, 0)
        member.barrier()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    use(array.size)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"bytes": 1024 * (after - before)}


def killed_while_waited_for(member: Member) -> dict[str, Any]:
    member.barrier()
    if member.rank == VICTIM:
        time.sleep(0.2)
        die()
    return survive(member, member.barrier)


def killed_before_its_first_call(member: Member) -> dict[str, Any]:
    if member.rank == VICTIM:
        die()
    return survive(member, member.barrier)


def killed_while_it_computes_a_large_reduction(member: Member) -> dict[str, Any]:
    array = np.ones(4 * MIB, np.float32)
    member.all_reduce(array, ReduceOp.SUM)
    if member.rank == VICTIM:
        threading.Timer(0.1, die).start()

    def again() -> None:
        while True:
            member.all_reduce(array, ReduceOp.MAX)

    return survive(member, again)


def killed_while_it_sends(member: Member) -> dict[str, Any]:
    message = np.ones(16 * MIB, np.uint8)
    member.barrier()
    if member.rank == VICTIM:
        threading.Timer(0.1, die).start()
        while True:
            for peer in range(member.size):
                if peer != VICTIM:
                    member.send(message, peer)

    def receive() -> None:
        while True:
            member.recv(message, VICTIM)

    return survive(member, receive)


def killed_while_sent_to(member: Member) -> dict[str, Any]:
    message = np.ones(64 * MIB, np.uint8)
    member.barrier()
    if member.rank == VICTIM:
        time.sleep(0.2)
        die()

    def send() -> None:
        while True:
            member.send(message, VICTIM)

    return survive(member, send)


def stopped(member: Member) -> dict[str, Any]:
    """A rank that is stopped is nobody's death: the deadline ends the wait."""
    member.barrier()
    if member.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGSTOP)
        return {}
    try:
        member.barrier(timeout=0.3)
    except CommunicatorTimeoutError as error:
        return {"late": error.peer}
    return {}


def idle(member: Member) -> dict[str, Any]:
    """Waiting costs next to no processor time."""
    member.barrier()
    if member.rank == VICTIM:
        time.sleep(1.0)
        spent = 0.0
        member.barrier()
    else:
        before = time.process_time()
        member.barrier()
        spent = time.process_time() - before
    return {"spent": spent}


def main() -> None:
    rank, size, port = map(int, sys.argv[1:4])
    store = TCPStore("127.0.0.1", port, size, wait_for_workers=False)
    before = holdings()
    runtime = Runtime(secret=b"secret of the tests")
    comm = ShmCommunicator(Membership("group", rank, tuple(range(size)), store, runtime))
    result = globals()[sys.argv[4]](Member(comm))
    comm.close()
    runtime.close()
    del comm
    gc.collect()  # an error that was raised may be in a cycle with its traceback
    after = holdings()
    left = {name: count for name, count in after.items() if count > before[name]}
    print(json.dumps({**result, "left": left}))
    store.close()


if __name__ == "__main__":
    main()
