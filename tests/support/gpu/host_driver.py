"""A driver whose device memory is the host's, for running the protocols of GPUs without one.

Streams are queues of work, not threads: work is done when somebody asks whether an event has
arrived, and then in a random order among the streams that may go on. So work that was not ordered
by an event gets done in the wrong order sooner or later. Memory is filled with garbage when it is
allocated and when it is freed, and every access is checked to be inside living memory.
"""

from __future__ import annotations

import ctypes
import math
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from transport._errors import DistBackendError
from transport._operands.reduce_op import Flat, RedOpType, ReduceOp, reduction_dtype

POISON = 0xA5


class _Stream:
    def __init__(self) -> None:
        self.work: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self.held = False


class _Moment:
    def __init__(self) -> None:
        self.reached = False


class HostMachine:
    """The devices of one host, which all ranks of a test share."""

    def __init__(self, devices: int = 1, seed: int = 0) -> None:
        self.devices = devices
        self.lock = threading.RLock()
        self.streams: dict[int, _Stream] = {}
        # By address. Not weak values: those change while a thread iterates, when another
        # thread drops the last reference. Each memory takes itself out.
        self.allocations: dict[int, weakref.ref[HostMemory]] = {}
        self.opened: list[int] = []
        self.kept: list[Any] = []
        self.failure: str | None = None
        self._random = random.Random(seed)
        self._next = 1000

    def new_stream(self) -> int:
        with self.lock:
            self._next += 1
            self.streams[self._next] = _Stream()
            return self._next

    def put(
        self, stream: int, run: Callable[[], None], ready: Callable[[], bool] = lambda: True
    ) -> None:
        with self.lock:
            self.streams[stream].work.append((ready, run))

    def pump(self) -> None:
        """Do whatever may be done, in a random order."""
        with self.lock:
            moved = True
            while moved:
                moved = False
                streams = list(self.streams.values())
                self._random.shuffle(streams)
                for stream in streams:
                    if stream.work and not stream.held and stream.work[0][0]():
                        stream.work.popleft()[1]()
                        moved = True

    def hold(self, stream: int) -> None:
        """Let nothing of ``stream`` be done until ``release``."""
        with self.lock:
            self.streams[stream].held = True

    def release(self, stream: int) -> None:
        with self.lock:
            self.streams[stream].held = False

    def living(self) -> list[tuple[int, HostMemory]]:
        """The memory that is allocated now, by address."""
        found = [(start, ref()) for start, ref in self.allocations.copy().items()]
        return [(start, memory) for start, memory in found if memory is not None]

    def view(self, pointer: int, dtype: Any, count: int) -> Flat:
        """The memory behind an address; AssertionError unless it is living device memory."""
        nbytes = np.dtype(dtype).itemsize * count
        with self.lock:
            inside = any(
                start <= pointer and pointer + nbytes <= start + memory.nbytes
                for start, memory in self.living()
            )
        assert inside or not nbytes, f"access to {nbytes} bytes at {pointer:#x}: not allocated"
        raw = (ctypes.c_uint8 * nbytes).from_address(pointer)
        return np.frombuffer(raw, np.uint8).view(dtype)


class HostMemory:
    def __init__(self, machine: HostMachine, nbytes: int, device: int) -> None:
        self.device = device
        self.nbytes = max(nbytes, 1)
        self._bytes = np.full(self.nbytes, POISON, np.uint8)
        self.pointer = self._bytes.ctypes.data
        with machine.lock:
            machine.allocations[self.pointer] = weakref.ref(self)
        self._allocations = machine.allocations

    def __del__(self) -> None:
        self._allocations.pop(self.pointer, None)  # No lock: this may run in any thread.
        self._bytes[:] = POISON


class HostEvent:
    def __init__(self, machine: HostMachine) -> None:
        self._machine = machine
        self.moment = _Moment()
        self.moment.reached = True

    def record(self, stream: int) -> None:
        moment = self.moment = _Moment()

        def reach() -> None:
            moment.reached = True

        self._machine.put(stream, reach)

    def query(self) -> bool:
        if self._machine.failure is not None:
            raise DistBackendError(self._machine.failure)
        self._machine.pump()
        return self.moment.reached


class HostDriver:
    """One rank's driver on a ``HostMachine``."""

    def __init__(self, machine: HostMachine | None = None) -> None:
        self.machine = machine or HostMachine()
        self._current = threading.local()
        self._defaults = [self.machine.new_stream() for _ in range(self.machine.devices)]

    def device_count(self) -> int:
        return self.machine.devices

    def device_id(self, device: int) -> str:
        return f"host:{device}"

    def current_device(self) -> int:
        return getattr(self._current, "device", 0)

    def choose_device(self, device: int) -> None:
        assert 0 <= device < self.machine.devices
        self._current.device = device

    def device_of(self, pointer: int) -> int:
        return next(
            memory.device
            for start, memory in self.machine.living()
            if start <= pointer < start + max(memory.nbytes, 1)
        )

    @contextmanager
    def on(self, device: int, stream: int | None = None) -> Iterator[None]:
        before = self.current_device(), self.current_stream(device)
        self._current.device = device
        if stream is not None:
            self._streams()[device] = stream
        try:
            yield
        finally:
            self._current.device, self._streams()[device] = before

    def current_stream(self, device: int) -> int:
        return self._streams().get(device, self._defaults[device])

    def _streams(self) -> dict[int, int]:
        """The calling thread's current streams, by device: those that are not the default one."""
        return self._current.__dict__.setdefault("streams", {})

    def create_stream(self, device: int) -> int:
        return self.machine.new_stream()

    def destroy_stream(self, stream: int, device: int) -> None:
        assert stream in self.machine.streams, "destroyed twice"

    def create_event(self, device: int) -> HostEvent:
        return HostEvent(self.machine)

    def wait_event(self, stream: int, event: Any, device: int | None = None) -> None:
        moment = event.moment
        self.machine.put(stream, lambda: None, lambda: moment.reached)

    def allocate(self, nbytes: int, device: int) -> HostMemory:
        return HostMemory(self.machine, nbytes, device)

    def scratch(self, nbytes: int, device: int, stream: int) -> HostMemory:
        return HostMemory(self.machine, nbytes, device)

    def array(
        self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: object
    ) -> Any:
        from tests.support.gpu.fake_gpu import FakeArray

        nbytes = math.prod(shape) * dtype.itemsize
        memory = SimpleNamespace(pointer=pointer, nbytes=nbytes, device=device, owner=owner)
        return FakeArray(self, memory, shape, dtype)

    def pinned(self, nbytes: int) -> Flat:
        return np.full(nbytes, POISON, np.uint8)

    def copy_to_host(self, into: Flat, pointer: int, stream: int) -> None:
        raw = into.view(np.uint8)

        def run() -> None:
            raw[:] = self.machine.view(pointer, np.uint8, raw.size)

        self.machine.put(stream, run)

    def copy_from_host(self, pointer: int, data: Flat, stream: int) -> None:
        raw = data.view(np.uint8)

        def run() -> None:
            self.machine.view(pointer, np.uint8, raw.size)[:] = raw

        self.machine.put(stream, run)

    def copy(self, into: int, pointer: int, nbytes: int, stream: int) -> None:
        def run() -> None:
            self.machine.view(into, np.uint8, nbytes)[:] = self.machine.view(
                pointer, np.uint8, nbytes
            )

        self.machine.put(stream, run)

    def can_reduce(self, dtype: np.dtype[Any], inputs: int) -> bool:
        return dtype.name not in ("longdouble", "clongdouble", "float128", "complex256")

    def reduce(
        self,
        out: int,
        inputs: Sequence[int],
        dtype: np.dtype[Any],
        count: int,
        op: ReduceOp,
        stream: int,
    ) -> None:
        assert op.kind is not RedOpType.PREMUL_SUM
        work = reduction_dtype(dtype)

        def run() -> None:
            with np.errstate(all="ignore"):
                total = self.machine.view(inputs[0], dtype, count).astype(work)
                for pointer in inputs[1:]:
                    op.combine(total, self.machine.view(pointer, dtype, count).astype(work), total)
                op.finish(total, len(inputs))
                self.machine.view(out, dtype, count)[:] = total.astype(dtype)

        self.machine.put(stream, run)

    def scale(
        self, out: int, pointer: int, dtype: np.dtype[Any], count: int, factor: Any, stream: int
    ) -> None:
        def run() -> None:
            with np.errstate(all="ignore"):
                values = self.machine.view(pointer, dtype, count).astype(reduction_dtype(dtype))
                np.multiply(values, factor, out=values, casting="same_kind")
                self.machine.view(out, dtype, count)[:] = values.astype(dtype)

        self.machine.put(stream, run)

    def signal(self, addresses: Sequence[int], value: int, stream: int) -> None:
        def run() -> None:
            for address in addresses:
                flag = self.machine.view(address, np.uint64, 1)
                flag[0] = max(int(flag[0]), value)

        self.machine.put(stream, run)

    def wait_value(self, addresses: Sequence[int], value: int, stream: int) -> None:
        def ready() -> bool:
            return all(
                self.machine.view(address, np.uint64, 1)[0] >= value for address in addresses
            )

        self.machine.put(stream, lambda: None, ready)

    def process_id(self) -> int:
        return id(self)  # as if each rank were a process

    def keep(self, memory: Any) -> None:
        self.machine.kept.append(memory)

    def share(self, pointer: int) -> tuple[bytes, int]:
        with self.machine.lock:
            for start, memory in self.machine.living():
                if start <= pointer < start + memory.nbytes:
                    return start.to_bytes(8, "little"), pointer - start
        raise DistBackendError(f"no allocation at {pointer:#x}")

    def open(self, handle: bytes, device: int) -> int:
        base = int.from_bytes(handle, "little")
        assert base in self.machine.allocations, "a handle of freed memory was opened"
        with self.machine.lock:
            self.machine.opened.append(base)
        return base

    def close(self, base: int, device: int) -> None:
        with self.machine.lock:
            self.machine.opened.remove(base)
