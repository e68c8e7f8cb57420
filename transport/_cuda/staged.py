"""Calls on device memory through the host: pinned buffers and a transport for the CPU.

Experimental, not run on a GPU (``docs/run/gpu.md``).

This works whatever the GPUs and their drivers can do among themselves. Large calls are cut into
chunks. While the transport works on one chunk, the next one comes from the device and the last one
returns to it. A call blocks the host thread that makes it (with ``async_op`` the group's own),
because the transport below works on the host; other streams go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from transport._calls.call import Call
from transport._communicators.backends import CommunicatorFactory, over_tcp
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._cuda.completion import wait_until
from transport._cuda.device_state import (
    DeviceCommunicator,
    DeviceStream,
    DeviceStreams,
    check_one_device,
)
from transport._cuda.driver import CudaEvent
from transport._cuda.flat import DeviceFlat
from transport._errors import CommunicatorTimeoutError
from transport._operands.reduce_op import Flat, ReduceOp

CHUNK_BYTES = 4 << 20
_SLOTS = 2


@dataclass(frozen=True, slots=True)
class _StagedPiece:
    """A piece of device memory in a call: loaded to the host before, stored back after, or both."""

    flat: DeviceFlat
    load: bool = False
    store: bool = False

    def __getitem__(self, piece: slice) -> _StagedPiece:
        return _StagedPiece(self.flat[piece], self.load, self.store)


_Run = Callable[[list[Flat], int, int], None]
"""``run(host, lo, hi)`` makes the call on the transport below, for the elements ``lo`` to ``hi`` of
each part, of which ``host`` has copies."""


class StagedCommunicator(DeviceCommunicator):
    """Carries calls on device memory through ``inner``, a communicator for the CPU.

    ``inner`` has the same members and belongs to this communicator. ``chunk`` is the number of
    bytes of one step for each buffer, equal on all members.
    """

    def __init__(
        self, membership: Membership, inner: Communicator, chunk: int = CHUNK_BYTES
    ) -> None:
        super().__init__(membership)
        self._inner = inner
        self._chunk = chunk
        self._streams = DeviceStreams()
        # Pinned memory, through which steps go in turn.
        self._slots: list[Flat | None] = [None] * _SLOTS
        self.abort_reason: str | None = None

    # Collectives whose sizes all members know: in chunks.

    def barrier(self, call: Call) -> None:
        self._inner.barrier(call)

    def broadcast(self, call: Call, buffer: DeviceFlat, root: int) -> None:
        def run(host: list[Flat], lo: int, hi: int) -> None:
            self._inner.broadcast(call, host[0], root)

        is_root = root == self.rank
        parts = [_StagedPiece(buffer, load=is_root, store=not is_root)]
        self._staged(call, parts, run, self._chunks(buffer.size, buffer.itemsize))

    def all_reduce(self, call: Call, buffer: DeviceFlat, op: ReduceOp) -> None:
        def run(host: list[Flat], lo: int, hi: int) -> None:
            self._inner.all_reduce(call, host[0], op.part(lo, hi, buffer.size))

        parts = [_StagedPiece(buffer, load=True, store=True)]
        self._staged(call, parts, run, self._chunks(buffer.size, buffer.itemsize))

    def reduce(self, call: Call, buffer: DeviceFlat, op: ReduceOp, root: int) -> None:
        def run(host: list[Flat], lo: int, hi: int) -> None:
            self._inner.reduce(call, host[0], op.part(lo, hi, buffer.size), root)

        parts = [_StagedPiece(buffer, load=True, store=root == self.rank)]
        self._staged(call, parts, run, self._chunks(buffer.size, buffer.itemsize))

    def scan(self, call: Call, buffer: DeviceFlat, op: ReduceOp, exclusive: bool) -> None:
        def run(host: list[Flat], lo: int, hi: int) -> None:
            part = op.part(lo, hi, buffer.size)
            self._inner.scan(call, host[0], part, exclusive)

        parts = [_StagedPiece(buffer, load=True, store=True)]
        self._staged(call, parts, run, self._chunks(buffer.size, buffer.itemsize))

    def all_gather(self, call: Call, outputs: Sequence[DeviceFlat], input_: DeviceFlat) -> None:
        def run(host: list[Flat], lo: int, hi: int) -> None:
            self._inner.all_gather(call, host[1:], host[0])

        parts = [
            _StagedPiece(input_, load=True),
            *(_StagedPiece(output, store=True) for output in outputs),
        ]
        longest = max(output.size for output in outputs)
        self._staged(call, parts, run, self._vouched(call, longest, input_.itemsize))

    def reduce_scatter(
        self, call: Call, output: DeviceFlat, inputs: Sequence[DeviceFlat], op: ReduceOp
    ) -> None:
        starts = np.cumsum([0, *(input_.size for input_ in inputs)]).tolist()
        total = starts.pop()
        array_factor = op.factor is not None and np.ndim(op.factor) > 0

        def run(host: list[Flat], lo: int, hi: int) -> None:
            part = op
            if array_factor:
                # The factor of what is in this step: the same piece of each member's part.
                whole = np.broadcast_to(op.factor, total)
                ends = [start + input_.size for start, input_ in zip(starts, inputs, strict=True)]
                pieces = [
                    whole[min(start + lo, end) : min(start + hi, end)]
                    for start, end in zip(starts, ends, strict=True)
                ]
                part = ReduceOp(op.kind, np.concatenate(pieces))
            self._inner.reduce_scatter(call, host[0], host[1:], part)

        parts = [
            _StagedPiece(output, store=True),
            *(_StagedPiece(input_, load=True) for input_ in inputs),
        ]
        longest = max(input_.size for input_ in inputs)
        self._staged(call, parts, run, self._vouched(call, longest, output.itemsize))

    # Collectives of which nobody knows all sizes: as a whole.

    def gather(
        self, call: Call, outputs: Sequence[DeviceFlat] | None, input_: DeviceFlat, root: int
    ) -> None:
        def run(host: list[Flat], lo: int, hi: int) -> None:
            self._inner.gather(call, None if outputs is None else host[1:], host[0], root)

        outs = (_StagedPiece(output, store=True) for output in outputs or ())
        self._staged(call, [_StagedPiece(input_, load=True), *outs], run)

    def scatter(
        self, call: Call, output: DeviceFlat, inputs: Sequence[DeviceFlat] | None, root: int
    ) -> None:
        def run(host: list[Flat], lo: int, hi: int) -> None:
            self._inner.scatter(call, host[0], None if inputs is None else host[1:], root)

        ins = (_StagedPiece(input_, load=True) for input_ in inputs or ())
        self._staged(call, [_StagedPiece(output, store=True), *ins], run)

    def all_to_all(
        self, call: Call, outputs: Sequence[DeviceFlat], inputs: Sequence[DeviceFlat]
    ) -> None:
        def run(host: list[Flat], lo: int, hi: int) -> None:
            self._inner.all_to_all(call, host[: self.size], host[self.size :])

        outs = [_StagedPiece(output, store=True) for output in outputs]
        self._staged(call, [*outs, *(_StagedPiece(input_, load=True) for input_ in inputs)], run)

    # Point to point.

    def send(self, call: Call, buffer: DeviceFlat, dst: int, tag: int) -> None:
        stream = self._streams.get(buffer, "messages")
        stream.begin([buffer])
        host = _pinned(stream, buffer)
        if buffer.size:
            stream.driver.copy_to_host(host, buffer.pointer, stream.handle)
        self._await(call, stream.now())
        self._inner.send(call, host, dst, tag)

    def recv(self, call: Call, buffer: DeviceFlat, src: int | None, tag: int) -> int:
        stream = self._streams.get(buffer, "messages")
        host = _pinned(stream, buffer)
        source = self._inner.recv(call, host, src, tag)
        stream.begin([buffer])
        if buffer.size:
            stream.driver.copy_from_host(buffer.pointer, host, stream.handle)
        stream.end(call, [buffer], host)
        return source

    def lose(self, peer: int, reason: str) -> None:
        self._inner.lose(peer, reason)

    @property
    def receiving(self) -> bool:
        return self._inner.receiving

    def left_over(self) -> list[str]:
        return self._inner.left_over()

    # The end.

    def abort(self, reason: str) -> None:
        if self.abort_reason is None:
            self.abort_reason = reason
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()
        self._streams.close()

    # The implementation.

    def _chunks(self, count: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the steps over ``count`` elements; one, empty, when there are none:
        empty calls meet the other members as well.
        """
        step = max(1, self._chunk // itemsize)
        for lo in range(0, max(count, 1), step):
            yield lo, min(lo + step, count)

    def _vouched(self, call: Call, count: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """Yield steps where the header says that all members have the same sizes, else one step:
        members that disagree must find out before anything is written.
        """
        header = call.header
        agreed = header.elements or header.extra
        return self._chunks(count, itemsize) if agreed else iter([(0, count)])

    def _staged(
        self,
        call: Call,
        parts: Sequence[_StagedPiece],
        run: _Run,
        chunks: Iterator[tuple[int, int]] | None = None,
    ) -> None:
        """Make a call in steps, one for each of ``chunks`` of its ``parts``; by default in one."""
        self.check_open()
        flats = [part.flat for part in parts]
        check_one_device(flats)
        stream = self._streams.get(flats[0], "collectives")
        stream.begin(flats)
        whole = 0, max(flat.size for flat in flats)
        waiting: deque[Callable[[], None]] = deque()
        for number, (lo, hi) in enumerate([whole] if chunks is None else chunks):
            step = [part[lo:hi] for part in parts]
            host = self._host(call, stream, step, number % _SLOTS)
            loaded = _load(stream, step, host)
            go = partial(run, host, lo, hi)
            waiting.append(partial(self._carry_out, call, stream, step, host, loaded, go))
            if len(waiting) == _SLOTS:  # loads run one step ahead
                waiting.popleft()()
        while waiting:
            waiting.popleft()()
        stream.end(call, flats)

    def _carry_out(
        self,
        call: Call,
        stream: DeviceStream,
        step: Sequence[_StagedPiece],
        host: list[Flat],
        loaded: CudaEvent,
        run: Callable[[], None],
    ) -> None:
        self._await(call, loaded)
        run()
        for part, flat in zip(step, host, strict=True):
            if part.store and flat.size:
                stream.driver.copy_from_host(part.flat.pointer, flat, stream.handle)

    def _host(
        self, call: Call, stream: DeviceStream, step: Sequence[_StagedPiece], slot: int
    ) -> list[Flat]:
        """Return the host's places for the parts of ``step``, one behind the other in a slot.

        What the slot held before is on its way back to the device at most, on this same stream.
        A load into it comes behind that; a host call that writes into it waits for ``loaded``,
        which is behind it as well.
        """
        starts: list[int] = []
        end = 0
        for part in step:
            starts.append(end)
            end += -(-part.flat.nbytes // 64) * 64
        memory = self._slots[slot]
        if memory is None or memory.nbytes < end:
            self._await(call, stream.now())  # for copies from the memory that is given up
            memory = self._slots[slot] = stream.driver.pinned(end)
        return [
            memory[start : start + part.flat.nbytes].view(part.flat.dtype)
            for start, part in zip(starts, step, strict=True)
        ]

    def _await(self, call: Call, event: CudaEvent) -> None:
        if not wait_until(event.query, call.deadline, self.check_open):
            raise CommunicatorTimeoutError(
                f"{call.header}: waited {call.deadline.seconds:g} s for this rank's own device:"
                " work that was put on the array's stream before the call has not ended",
                None,
            )


def _load(stream: DeviceStream, step: Sequence[_StagedPiece], host: Sequence[Flat]) -> CudaEvent:
    """Copy the data to load to the host; return the moment when it is there."""
    for part, flat in zip(step, host, strict=True):
        if part.load and flat.size:
            stream.driver.copy_to_host(flat, part.flat.pointer, stream.handle)
    return stream.now()


def _pinned(stream: DeviceStream, flat: DeviceFlat) -> Flat:
    return stream.driver.pinned(flat.nbytes)[: flat.nbytes].view(flat.dtype)


def make_communicator(
    membership: Membership, cpu: CommunicatorFactory = over_tcp
) -> StagedCommunicator:
    """Make a communicator that goes via the host and the transport ``cpu``."""
    return StagedCommunicator(membership, cpu(membership))
