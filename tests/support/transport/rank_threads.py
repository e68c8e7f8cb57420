"""Runs the members of a group as threads of the test, over any transport, with a deadline."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.net.certificates import tls_of_the_tests
from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._choosing.choice import DEFAULT, Thresholds
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership, Runtime
from transport._errors import CommunicatorAbortedError, CommunicatorTimeoutError, PeerLostError
from transport._links.alone import AloneCommunicator
from transport._operands.reduce_op import Flat, ReduceOp
from transport._place import this_place
from transport._store.hash_store import HashStore
from transport._store.prefix_store import PrefixStore
from transport._waiting.deadline import Deadline

LONG = 60.0
"""Seconds after which a test that should never wait gives up."""

# Thresholds so small that every algorithm and several chunks run on a few dozen elements.
TINY = Thresholds(
    star=12,
    star_ranks=4,
    all_reduce_doubling=24,
    reduce_scatter_doubling=48,
    all_gather_doubling=48,
    broadcast_tree=24,
    reduce_tree=24,
    frame=0,
    one_slice=24,
    pairwise_ranks=3,
    segment=64,
    piece=16,
)

Make = Callable[[Membership, Thresholds], Communicator]


@dataclass(frozen=True)
class Transport:
    """How to make the communicators of one transport.

    ``has_links``: collectives of two are made of frames over links, which one member may end alone;
    ``shows_links``: a test may use them. ``on_device``: buffers are copied to a device and back.
    ``tls``: what goes over TCP goes inside TLS.
    """

    name: str
    make: Make
    has_links: bool = True
    shows_links: bool = True
    on_device: bool = False
    tls: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass
class Member:
    """One rank of a running group: its communicator, and calls with rising sequence numbers."""

    comm: Communicator
    timeout: float = LONG
    sequence: int = 0
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def call(
        self,
        kind: Kind,
        dtype: Any = None,
        elements: int = 0,
        op: ReduceOp | None = None,
        root: int = NO_ROOT,
        timeout: float | None = None,
        extra: int = 0,
    ) -> Call:
        if kind in (Kind.SEND, Kind.RECV):  # from any thread, and apart from the collectives
            sequence = 0
        else:
            sequence = self.sequence = self.sequence + 1
        header = CallHeader(
            sequence,
            elements,
            root,
            kind,
            0 if dtype is None else dtype_code(np.dtype(dtype)),
            0 if op is None else op.code,
            extra=extra,
        )
        return Call(header, Deadline.after(self.timeout if timeout is None else timeout))

    def meet(self) -> None:
        """Open all channels between rank 0 and the others, for collectives and for messages."""
        nothing = np.zeros(0, np.uint8)
        for peer in range(1, self.size):
            if self.rank == 0:
                self.send(nothing, peer, tag=2**31)
                self.recv(nothing, peer, tag=2**31)
            elif self.rank == peer:
                self.recv(nothing, 0, tag=2**31)
                self.send(nothing, 0, tag=2**31)
        outputs = [nothing] * self.size
        self.comm.gather(self.call(Kind.GATHER), outputs if self.rank == 0 else None, nothing, 0)

    def barrier(self, timeout: float | None = None) -> None:
        self.comm.barrier(self.call(Kind.BARRIER, timeout=timeout))

    def all_reduce(self, buffer: Flat, op: ReduceOp, timeout: float | None = None) -> None:
        call = self.call(Kind.ALL_REDUCE, buffer.dtype, buffer.size, op, timeout=timeout)
        self.comm.all_reduce(call, buffer, op)

    def send(self, buffer: Flat, dst: int, tag: int = 0, timeout: float | None = None) -> None:
        call = self.call(Kind.SEND, buffer.dtype, buffer.size, timeout=timeout, extra=tag)
        self.comm.send(call, buffer, dst, tag)

    def recv(
        self, buffer: Flat, src: int | None, tag: int = 0, timeout: float | None = None
    ) -> int:
        call = self.call(Kind.RECV, buffer.dtype, buffer.size, timeout=timeout, extra=tag)
        return self.comm.recv(call, buffer, src, tag)


def run_threads(functions: Iterable[Callable[[], Any]], seconds: float = LONG) -> list[Any]:
    """Run each function in a thread of its own; return their results in order.

    Raises the most telling exception (one that is not merely the echo of another's failure),
    with the index of its thread as a note; AssertionError when a thread has not ended in time.
    """
    functions = list(functions)
    results: list[Any] = [None] * len(functions)
    errors: list[tuple[int, BaseException]] = []

    def body(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:  # noqa: BLE001 (handed to the caller)
            errors.append((index, error))

    threads = [
        threading.Thread(target=body, args=(i,), name=f"rank-{i}", daemon=True)
        for i in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    deadline = Deadline.after(seconds)
    for thread in threads:
        thread.join(deadline.remaining())
    echoes = (PeerLostError, CommunicatorAbortedError, CommunicatorTimeoutError)
    errors.sort(key=lambda pair: isinstance(pair[1], echoes))
    if errors:
        index, error = errors[0]
        error.add_note(f"in the thread of rank {index}")
        raise error
    stuck = [thread.name for thread in threads if thread.is_alive()]
    assert not stuck, f"threads still running after {seconds} s: {stuck}"
    return results


def run_group(
    transport: Transport,
    size: int,
    body: Callable[[Member], Any],
    table: Thresholds = DEFAULT,
    seconds: float = LONG,
    global_ranks: tuple[int, ...] | None = None,
) -> list[Any]:
    """Run ``body`` on every member of a new group; return the results by rank.

    A member whose body fails aborts, so that the others end as well; all are closed at the end.
    """
    store = HashStore()
    name = f"group-{uuid.uuid4().hex[:8]}"
    ranks = global_ranks or tuple(range(size))
    shared: dict[str, Any] = {}

    def member(rank: int) -> Any:
        with ExitStack() as stack:
            tls = tls_of_the_tests() if transport.tls else None
            runtime = Runtime(secret=b"secret of the tests", host="127.0.0.1", tls=tls)
            stack.callback(runtime.close)
            prefixed = PrefixStore(name, store.clone())
            places = (this_place(),) * size
            membership = Membership(name, rank, ranks, prefixed, runtime, places=places)
            if size > 1 or transport.on_device:
                comm = transport.make(membership, table)
            else:
                comm = AloneCommunicator(membership)  # as every backend has it
            stack.callback(comm.close)
            try:
                return body(Member(comm, shared=shared))
            except BaseException as error:
                comm.abort(f"rank {rank}: {error!r}")
                raise

    try:
        return run_threads([lambda rank=rank: member(rank) for rank in range(size)], seconds)
    finally:
        store.close()
