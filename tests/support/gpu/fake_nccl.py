"""NCCL in the memory of a ``HostMachine``: as asynchronous, and as strict about its callers.

A call takes part when its stream gets there, and is done when all members' have. Members whose
calls differ hang, as NCCL may, until the communicator is aborted; it cannot be destroyed then.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.gpu.host_driver import HostDriver, HostMachine
from tests.support.gpu.on_device import OnDevice
from transport._choosing.choice import Thresholds
from transport._communicators.backends import lookup
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._cuda.staged import StagedCommunicator
from transport._inproc.communicator import InprocCommunicator
from transport._links.alone import AloneCommunicator
from transport._nccl import NcclCommunicator
from transport._nccl import library as nccl
from transport._store.prefix_store import PrefixStore

DTYPES = {
    code: np.dtype(np.uint16 if name == "bfloat16" else name) for name, code in nccl.DTYPES.items()
}
_WAYS = {
    nccl.SUM: np.add,
    nccl.AVG: np.add,
    nccl.PROD: np.multiply,
    nccl.MIN: np.minimum,
    nccl.MAX: np.maximum,
}


class _Call:
    """One call (or group of calls) of all members: by rank, a list of (kind, arguments)."""

    def __init__(self) -> None:
        self.parts: dict[int, list[tuple[Any, ...]]] = {}
        self.done = False


class _Clique:
    def __init__(self, machine: HostMachine, size: int) -> None:
        self.machine = machine
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.calls: dict[int, _Call] = {}
        self.messages: dict[tuple[int, int], deque[np.ndarray]] = {}
        self.aborted = False
        self.error: str | None = None
        self.disputes: list[str] = []
        self.colors: dict[int, tuple[int, int]] = {}
        self.parts: dict[tuple[int, int], _Clique] = {}
        self.splits = [0] * size

    def arrive(self, number: int, rank: int, parts: list[tuple[Any, ...]]) -> bool:
        if self.aborted:
            return True
        call = self.calls.setdefault(number, _Call())
        call.parts[rank] = parts
        if len(call.parts) == self.size and not call.done and not self.disputes:
            self._perform(call.parts)
            call.done = not self.disputes
        return call.done

    def _perform(self, parts: dict[int, list[tuple[Any, ...]]]) -> None:
        if len({len(items) for items in parts.values()}) > 1:
            self.disputes.append("members make groups of different length")
            return
        for together in zip(*(parts[rank] for rank in range(self.size)), strict=True):
            same = [(item[0], *item[3:]) for item in together]
            if len(set(same)) > 1:
                self.disputes.append(f"members make different calls: {same}")
                return
            self._collective(together)

    def send(self, rank: int, source: int, count: int, dtype: int, peer: int) -> None:
        data = self._view(source, dtype, count).copy()
        self.messages.setdefault((rank, peer), deque()).append(data)

    def recv(self, rank: int, into: int, count: int, dtype: int, peer: int) -> None:
        self._view(into, dtype, count)[:] = self.messages[peer, rank].popleft()

    def _collective(self, items: tuple[tuple[Any, ...], ...]) -> None:
        kind = items[0][0]
        count, dtype = items[0][3:5]
        if kind == "broadcast":
            data = self._view(items[items[0][5]][1], dtype, count).copy()
            for item in items:
                self._view(item[2], dtype, count)[:] = data
        elif kind == "all_gather":
            data = np.concatenate([self._view(item[1], dtype, count) for item in items])
            for item in items:
                self._view(item[2], dtype, count * self.size)[:] = data
        else:
            times = self.size if kind == "reduce_scatter" else 1
            op = items[0][5]
            inputs = [self._view(item[1], dtype, count * times).copy() for item in items]
            with np.errstate(all="ignore"):
                total = inputs[0]
                for other in inputs[1:]:
                    total = _WAYS[op](total, other)
                if op == nccl.AVG:
                    total = (total / self.size).astype(total.dtype)
            for rank, item in enumerate(items):
                if kind == "all_reduce" or (kind == "reduce" and rank == item[6]):
                    self._view(item[2], dtype, count)[:] = total
                elif kind == "reduce_scatter":
                    part = total[rank * count : (rank + 1) * count]
                    self._view(item[2], dtype, count)[:] = part

    def _view(self, pointer: int, dtype: int, count: int) -> np.ndarray:
        if dtype == nccl.DTYPES["bfloat16"]:
            import ml_dtypes

            return self.machine.view(pointer, ml_dtypes.bfloat16, count)
        return self.machine.view(pointer, DTYPES[dtype], count)


class FakeComm:
    def __init__(self, library: FakeNccl, clique: _Clique, rank: int) -> None:
        self._library = library
        self._clique = clique
        self._rank = rank
        self._numbers = itertools.count()
        self.state = "open"

    def __getattr__(self, kind: str) -> Any:
        if kind not in (
            "all_reduce",
            "reduce",
            "broadcast",
            "all_gather",
            "reduce_scatter",
            "send",
            "recv",
        ):
            raise AttributeError(kind)

        def call(*args: Any) -> None:
            assert self.state == "open", "a call on a communicator that is gone"
            *given, stream = args
            self._library.put(self, stream, (kind, *given))

        return call

    def start(self, stream: int, parts: list[tuple[Any, ...]]) -> None:
        if parts[0][0] in ("send", "recv"):
            self._start_messages(stream, parts)
            return
        number, clique = next(self._numbers), self._clique
        clique.machine.put(stream, lambda: None, lambda: clique.arrive(number, self._rank, parts))

    def _start_messages(self, stream: int, parts: list[tuple[Any, ...]]) -> None:
        clique, rank = self._clique, self._rank
        sends = [args for kind, *args in parts if kind == "send"]
        receives = [args for kind, *args in parts if kind == "recv"]

        def send() -> None:
            for args in sends:
                clique.send(rank, *args)

        def fits(into: int, count: int, dtype: int, peer: int) -> bool:
            waiting = clique.messages.get((peer, rank))
            if waiting and waiting[0].size != count:
                clique.disputes.append(f"{waiting[0].size} elements come, {count} are expected")
            return bool(waiting) and waiting[0].size == count

        def ready() -> bool:
            return clique.aborted or all(fits(*args) for args in receives)

        def receive() -> None:
            for args in receives:
                if not clique.aborted:
                    clique.recv(rank, *args)

        clique.machine.put(stream, send)
        clique.machine.put(stream, receive, ready)

    def split(self, color: int, key: int) -> FakeComm | None:
        assert self.state == "open"
        clique = self._clique
        assert all(call.done for call in clique.calls.values()), "work is under way"
        clique.colors[self._rank] = color, key
        clique.barrier.wait()
        mine = sorted(
            (clique.colors[rank][1], rank)
            for rank in range(clique.size)
            if clique.colors[rank][0] == color
        )
        with clique.machine.lock:
            turn = (clique.splits[self._rank], color)
            part = clique.parts.setdefault(turn, _Clique(clique.machine, len(mine)))
            clique.splits[self._rank] += 1
        clique.barrier.wait()
        if color == nccl.NO_COLOR:
            return None
        comm = FakeComm(self._library, part, mine.index((key, self._rank)))
        self._library.comms.append(comm)
        return comm

    def async_error(self) -> str | None:
        return self._clique.error

    def abort(self) -> None:
        assert self.state == "open", "aborted twice"
        self.state = "aborted"
        self._clique.aborted = True

    def destroy(self) -> None:
        assert self.state == "open"
        assert not self._clique.disputes, self._clique.disputes
        self.state = "destroyed"


class FakeNccl:
    """One rank's NCCL; all ranks of one machine find each other by the unique id."""

    name = "fake"

    def __init__(self, driver: HostDriver, version: int = 22703) -> None:
        self.driver = driver
        self._version = version
        self.can_split = version >= nccl.SPLITS
        self.errors = (RuntimeError,)
        self.joins = 0
        self._cliques: dict[bytes, _Clique] = driver.machine.__dict__.setdefault("cliques", {})
        self._group = threading.local()
        self.comms: list[FakeComm] = []

    def version(self) -> int:
        return self._version

    def unique_id(self) -> bytes:
        return f"id {len(self._cliques)} {id(self)}".encode().ljust(128, b"\0")

    def join(self, size: int, rank: int, unique_id: bytes) -> FakeComm:
        machine = self.driver.machine
        with machine.lock:
            clique = self._cliques.setdefault(unique_id, _Clique(machine, size))
        clique.barrier.wait()
        self.joins += 1
        comm = FakeComm(self, clique, rank)
        self.comms.append(comm)
        return comm

    def group_start(self) -> None:
        self._group.parts = []

    def group_end(self) -> None:
        parts, self._group.parts = self._group.parts, None
        if parts:
            comm, stream = parts[0][:2]
            comm.start(stream, [part for _, _, part in parts])
        else:
            return

    def put(self, comm: FakeComm, stream: int, part: tuple[Any, ...]) -> None:
        gathered = getattr(self._group, "parts", None)
        if gathered is None:
            comm.start(stream, [part])
        else:
            gathered.append((comm, stream, part))


def channel(membership: Membership) -> Callable[[], Communicator]:
    """What the members compare their calls by."""
    store = PrefixStore("comparer", membership.store)
    beside = replace(membership, group=f"{membership.group}/comparer", store=store)
    return lambda: lookup("inproc").make(beside)


def make_nccl(membership: Membership, table: Thresholds) -> OnDevice:
    """A rank with a device of its own, on a machine that all ranks of the group share."""
    machine = membership.store.in_process("machine", lambda: HostMachine(membership.size))
    driver = HostDriver(machine)

    def fallback() -> StagedCommunicator:
        several = membership.size > 1
        host = InprocCommunicator(membership, table) if several else AloneCommunicator(membership)
        return StagedCommunicator(membership, host, 48)

    comm = NcclCommunicator(membership, fallback, channel(membership), FakeNccl(driver))
    return OnDevice(comm, driver, membership.rank)
