"""Collectives on one host by kernels that read the peers' memory. Ranks may share a GPU.

Experimental, not run on a GPU (``docs/run/gpu.md``).

Members exchange offers on the host (``offers.py``); everything else runs on their streams. Each
member's device memory has a counter for every member. In a step, a member raises its counter at
every member; its stream then waits until all its own counters have the same value. So a buffer is
read only after its owner's stream has reached the call, and its owner may reuse it only after all
members have read it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from transport._calls.call import Call
from transport._communicators.backends import CommunicatorFactory, over_tcp
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._cuda.completion import wait_until
from transport._cuda.device_state import (
    CLOSE_SECONDS,
    DeviceStream,
    check_device_of_group,
    check_one_device,
)
from transport._cuda.driver import DeviceMemory, Driver
from transport._cuda.flat import DeviceFlat, StreamOrder
from transport._cuda.staged import StagedCommunicator
from transport._cuda.watchdog import DeviceWatchdog
from transport._cuda_ipc.offers import Offers
from transport._cuda_ipc.segments import Segments
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistBackendError,
)
from transport._operands.flat import part_bounds
from transport._operands.reduce_op import RedOpType, ReduceOp, reduction_dtype
from transport._place import this_machine

_FLAG_BYTES = 8
_ABOVE_ALL = 1 << 62


class _DeviceState:
    """A member's stream and counters, created by the first call together with its peers."""

    def __init__(self, inner: Communicator, call: Call, driver: Driver, device: int) -> None:
        self.stream = DeviceStream(driver, device)
        self.segments = Segments(inner, driver, device)
        self.offers = Offers(inner, driver, device, self.segments)
        self._step = 0
        size = inner.size
        memory = driver.allocate(size * _FLAG_BYTES, device)
        driver.keep(memory)  # A peer may write to it after this rank has left.
        own = range(memory.pointer, memory.pointer + size * _FLAG_BYTES, _FLAG_BYTES)
        self._own = list(own)
        self._values = driver.pinned(size * _FLAG_BYTES).view(np.uint64)
        driver.keep(self._values)  # A copy may still read it after the last reference is gone.
        self._values[:] = 0
        driver.copy_from_host(memory.pointer, self._values, self.stream.handle)
        begin = self.stream.now()
        order = StreamOrder(begin, lambda: self.stream.handle, memory)
        counters = DeviceFlat(memory.pointer, size, np.dtype(np.uint64), device, driver, order)
        # The counters must be 0 before a peer can raise them.
        if not wait_until(begin.query, call.deadline):
            raise CommunicatorTimeoutError(
                f"{call.header}: this rank's device has not finished a copy of"
                f" {size * _FLAG_BYTES} bytes after {call.deadline.seconds:g} s; other work keeps"
                " it busy, or it failed",
                None,
            )
        # This stream never waits, so that it can write the values that end all waits.
        self._release = driver.create_stream(device)
        flags = self.offers.exchange(
            call, [counters[peer : peer + 1] for peer in range(size)], [_FLAG_BYTES] * size
        )
        if flags is None:
            raise DistBackendError(
                "backend 'cuda_ipc' cannot share memory between these processes: the driver"
                " refuses IPC handles (containers need a common IPC namespace); use 'cuda:staged'"
            )
        self.offers.hold()  # Every call writes to the members' counters.
        self._flags = flags

    def step(self) -> None:
        """Make the stream wait until all members' streams have reached this step."""
        self._step += 1
        driver, handle = self.stream.driver, self.stream.handle
        driver.signal(self._flags, self._step, handle)
        driver.wait_value(self._own, self._step, handle)

    def release_waits(self) -> None:
        """End all present and later waits of this member's stream, after the group has failed."""
        driver = self.stream.driver
        with driver.on(self.stream.device):
            self._values[:] = _ABOVE_ALL
            driver.copy_from_host(self._own[0], self._values, self._release)

    def close(self) -> None:
        """Destroy the streams; their queued work still runs."""
        self.stream.driver.destroy_stream(self._release, self.stream.device)
        self.stream.close()


_Work = Callable[[_DeviceState, list[int]], None]
"""Queues the work of a call on the stream, between its two steps. The arguments are the state and
the address of each member's offer.
"""


class CudaIpcCommunicator(StagedCommunicator):
    """A member of a group on one host. It owns ``inner``, which has the same members.

    Messages, and calls without a kernel, are staged through the host and ``inner``.
    """

    def __init__(self, membership: Membership, inner: Communicator) -> None:
        super().__init__(membership, inner)
        self._device: _DeviceState | None = None
        self._lock = threading.Lock()
        name = f"meshlib-cuda-ipc-{membership.rank}"
        self._watchdog = DeviceWatchdog(name, lambda: None, lambda error: self.abort(str(error)))

    # Collectives.

    def broadcast(self, call: Call, buffer: DeviceFlat, root: int) -> None:
        is_root = root == self.rank
        offered = [buffer if is_root else None] * self.size
        wanted = [buffer.nbytes if peer == root else 0 for peer in range(self.size)]

        def work(device: _DeviceState, sources: list[int]) -> None:
            if not is_root:
                _copy(device, buffer, sources[root])

        if not self._run(call, [buffer], offered, wanted, work):
            super().broadcast(call, buffer, root)

    def all_reduce(self, call: Call, buffer: DeviceFlat, op: ReduceOp) -> None:
        if not self._can_reduce(buffer, op, scales=True):
            super().all_reduce(call, buffer, op)
            return
        plain = ReduceOp.SUM if op.kind is RedOpType.PREMUL_SUM else op
        parts = [buffer[slice(*part_bounds(buffer.size, self.size, i))] for i in range(self.size)]

        def work(device: _DeviceState, sources: list[int]) -> None:
            # Each member reduces one part, then fetches the other parts. Before the step, no other
            # member reads the part that this member writes.
            own = parts[self.rank]
            offset = own.pointer - buffer.pointer
            _reduce_into(device, own, [source + offset for source in sources], plain)
            device.step()
            for peer, part in enumerate(parts):
                if peer != self.rank:
                    _copy(device, part, sources[peer] + part.pointer - buffer.pointer)

        def prepare(device: _DeviceState) -> None:
            if op.kind is RedOpType.PREMUL_SUM and buffer.size:
                at, stream = buffer.pointer, device.stream
                stream.driver.scale(at, at, buffer.dtype, buffer.size, op.factor, stream.handle)

        offered = [buffer] * self.size
        wanted = [buffer.nbytes] * self.size
        if not self._run(call, [buffer], offered, wanted, work, prepare):
            super().all_reduce(call, buffer, op)

    def reduce(self, call: Call, buffer: DeviceFlat, op: ReduceOp, root: int) -> None:
        if not self._can_reduce(buffer, op):
            super().reduce(call, buffer, op, root)
            return
        is_root = root == self.rank
        offered = [buffer if peer == root else None for peer in range(self.size)]
        wanted = [buffer.nbytes if is_root else 0] * self.size

        def work(device: _DeviceState, sources: list[int]) -> None:
            if is_root:
                _reduce_into(device, buffer, sources, op)

        if not self._run(call, [buffer], offered, wanted, work):
            super().reduce(call, buffer, op, root)

    def all_gather(self, call: Call, outputs: Sequence[DeviceFlat], input_: DeviceFlat) -> None:
        wanted = [output.nbytes for output in outputs]
        flats = [input_, *outputs]
        if not self._run(call, flats, [input_] * self.size, wanted, _copies_into(outputs)):
            super().all_gather(call, outputs, input_)

    def reduce_scatter(
        self, call: Call, output: DeviceFlat, inputs: Sequence[DeviceFlat], op: ReduceOp
    ) -> None:
        if not self._can_reduce(output, op):
            super().reduce_scatter(call, output, inputs, op)
            return

        def work(device: _DeviceState, sources: list[int]) -> None:
            _reduce_into(device, output, sources, op)

        wanted = [output.nbytes] * self.size
        if not self._run(call, [output, *inputs], inputs, wanted, work):
            super().reduce_scatter(call, output, inputs, op)

    def gather(
        self, call: Call, outputs: Sequence[DeviceFlat] | None, input_: DeviceFlat, root: int
    ) -> None:
        outs = list(outputs or ())
        offered = [input_ if peer == root else None for peer in range(self.size)]
        wanted = [output.nbytes for output in outs] or [0] * self.size

        if not self._run(call, [input_, *outs], offered, wanted, _copies_into(outs)):
            super().gather(call, outputs, input_, root)

    def scatter(
        self, call: Call, output: DeviceFlat, inputs: Sequence[DeviceFlat] | None, root: int
    ) -> None:
        ins = list(inputs or ())
        offered = ins or [None] * self.size
        wanted = [output.nbytes if peer == root else 0 for peer in range(self.size)]

        def work(device: _DeviceState, sources: list[int]) -> None:
            _copy(device, output, sources[root])

        if not self._run(call, [output, *ins], offered, wanted, work):
            super().scatter(call, output, inputs, root)

    def all_to_all(
        self, call: Call, outputs: Sequence[DeviceFlat], inputs: Sequence[DeviceFlat]
    ) -> None:
        wanted = [output.nbytes for output in outputs]
        if not self._run(call, [*outputs, *inputs], inputs, wanted, _copies_into(outputs)):
            super().all_to_all(call, outputs, inputs)

    # Memory.

    def allocate_on(self, call: Call, driver: Driver, device: int, nbytes: int) -> DeviceMemory:
        return self._state(call, driver, device).segments.allocate(call, nbytes)

    # The end.

    def abort(self, reason: str) -> None:
        super().abort(reason)
        with self._lock:
            device = self._device
        self._watchdog.fail(CommunicatorAbortedError(reason))
        if device is not None:
            device.release_waits()

    def close(self) -> None:
        with self._lock:
            device, self._device = self._device, None
        drained = self._watchdog.drain(CLOSE_SECONDS)
        self._watchdog.close()
        super().close()
        if device is not None:
            if drained and self.abort_reason is None:
                device.offers.close()
                device.segments.close()
            device.release_waits()
            device.close()

    # The implementation.

    def _can_reduce(self, flat: DeviceFlat, op: ReduceOp, scales: bool = False) -> bool:
        """Return whether a kernel exists. The result is the same on all members."""
        if op.kind is RedOpType.PREMUL_SUM:
            # In-place scaling would round a small float twice.
            rounds_once = reduction_dtype(flat.dtype) == flat.dtype
            if not (scales and rounds_once and np.ndim(op.factor) == 0):
                return False
        return flat.driver.can_reduce(flat.dtype, self.size)

    def _run(
        self,
        call: Call,
        flats: Sequence[DeviceFlat],
        offered: Sequence[DeviceFlat | None],
        wanted: Sequence[int],
        work: _Work,
        prepare: Callable[[_DeviceState], None] | None = None,
    ) -> bool:
        """Queue a call on the stream. Return False, on all members, if memory cannot be shared."""
        check_one_device(flats)
        device = self._state(call, flats[0].driver, flats[0].device)
        # Running calls may read the mapped memory, so unmapping must wait for them.
        if device.offers.crowded and self._watchdog.drain(call.deadline.remaining()):
            device.offers.trim()
        sources = device.offers.exchange(call, offered, wanted)
        if sources is None:
            return False
        stream = device.stream
        with stream.driver.on(stream.device):
            stream.begin(flats)
            if prepare is not None:
                prepare(device)
            device.step()
            work(device, sources)
            device.step()
        self._watchdog.add(call, stream.end(call, flats))
        return True

    def _state(self, call: Call, driver: Driver, number: int) -> _DeviceState:
        self._watchdog.check_for(call)
        self.check_open()
        if self._device is None:
            self._check_one_host(call)
            device = _DeviceState(self._inner, call, driver, number)
            with self._lock:
                self._device = device
        check_device_of_group(self._device.stream, number)
        return self._device

    def _check_one_host(self, call: Call) -> None:
        own = np.frombuffer(this_machine().encode()[:64].ljust(64), np.uint8)
        hosts = [np.empty(64, np.uint8) for _ in range(self.size)]
        self._inner.all_gather(call, hosts, own)
        for peer, host in enumerate(hosts):
            if not np.array_equal(host, own):
                raise DistBackendError(
                    f"{self.membership.describe(peer)} is on another host, but backend 'cuda_ipc'"
                    " needs all ranks on one host; use 'cuda:nccl' or 'cuda:staged'"
                )


def _copy(device: _DeviceState, into: DeviceFlat, source: int) -> None:
    if into.size:
        stream = device.stream
        stream.driver.copy(into.pointer, source, into.nbytes, stream.handle)


def _copies_into(outputs: Sequence[DeviceFlat]) -> _Work:
    """Return the work that copies member i's offer into ``outputs[i]``; none without outputs."""

    def work(device: _DeviceState, sources: list[int]) -> None:
        for output, source in zip(outputs, sources, strict=False):
            _copy(device, output, source)

    return work


def _reduce_into(
    device: _DeviceState, into: DeviceFlat, sources: Sequence[int], op: ReduceOp
) -> None:
    if into.size:
        stream = device.stream
        stream.driver.reduce(into.pointer, sources, into.dtype, into.size, op, stream.handle)


def make_communicator(
    membership: Membership, cpu: CommunicatorFactory = over_tcp
) -> CudaIpcCommunicator:
    """Make a communicator whose members exchange offers over the transport ``cpu``."""
    return CudaIpcCommunicator(membership, cpu(membership))
