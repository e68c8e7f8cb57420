"""Calls on device memory through pinned host buffers and a transport for the CPU.

Experimental, not run on a GPU (``docs/run/gpu.md``).

This works even without peer access between GPUs. Large calls are cut into chunks. While the CPU
transport works on one chunk, the next one is copied from the device and the previous one back to
it. A call blocks its host thread (with ``async_op``, the group's thread), because the CPU transport
runs there. Other streams are not blocked.
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
    """A piece of device memory in a call. ``load`` copies it to the host before the call, ``store``
    copies it back afterwards.
    """

    flat: DeviceFlat
    load: bool = False
    store: bool = False

    def __getitem__(self, piece: slice) -> _StagedPiece:
        return _StagedPiece(self.flat[piece], self.load, self.store)


_Run = Callable[[list[Flat], int, int], None]
"""``run(host, lo, hi)`` makes the call on the CPU transport for elements ``lo`` to ``hi`` of each
part; ``host`` holds copies of them.
"""


class StagedCommunicator(DeviceCommunicator):
    """Makes calls on device memory through ``inner``, a communicator for the CPU.

    ``inner`` has the same members and belongs to this communicator. ``chunk`` is the maximum bytes
    of a buffer in one step, equal on all members.
    """

    def __init__(
        self, membership: Membership, inner: Communicator, chunk: int = CHUNK_BYTES
    ) -> None:
        super().__init__(membership)
        self._inner = inner
        self._chunk = chunk
        self._streams = DeviceStreams()
        # Pinned memory; successive steps use the slots in turn.
        self._slots: list[Flat | None] = [None] * _SLOTS
        self.abort_reason: str | None = None

    # Collectives in chunks, because all members know all sizes.

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
        self._staged(call, parts, run, self._agreed_chunks(call, longest, input_.itemsize))

    def reduce_scatter(
        self, call: Call, output: DeviceFlat, inputs: Sequence[DeviceFlat], op: ReduceOp
    ) -> None:
        starts = np.cumsum([0, *(input_.size for input_ in inputs)]).tolist()
        total = starts.pop()
        array_factor = op.factor is not None and np.ndim(op.factor) > 0

        def run(host: list[Flat], lo: int, hi: int) -> None:
            part = op
            if array_factor:
                # The factor for this step: the same piece of each member's part.
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
        self._staged(call, parts, run, self._agreed_chunks(call, longest, output.itemsize))

    # Collectives in one step, because no member knows all sizes.

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
        """Yield the bounds of the steps over ``count`` elements. Without elements, yield one empty
        step, because empty calls also synchronise with the other members.
        """
        step = max(1, self._chunk // itemsize)
        for lo in range(0, max(count, 1), step):
            yield lo, min(lo + step, count)

    def _agreed_chunks(self, call: Call, count: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """Yield several steps only if the header has the sizes, else one step: a mismatch between
        members must be detected before any output is written.
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
        """Make a call in steps, one for each of ``chunks`` (default: in one step)."""
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
            waiting.append(partial(self._run_step, call, stream, step, host, loaded, go))
            if len(waiting) == _SLOTS:  # Loads are queued one step ahead.
                waiting.popleft()()
        while waiting:
            waiting.popleft()()
        stream.end(call, flats)

    def _run_step(
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
        """Return host buffers for the parts of ``step``, consecutive in a slot.

        The slot's previous contents may still be in a copy to the device, on the same stream. The
        loads of ``step`` are queued after that copy. A host call writes into the slot only after
        the event ``loaded``, which is also after the copy.
        """
        starts: list[int] = []
        end = 0
        for part in step:
            starts.append(end)
            end += -(-part.flat.nbytes // 64) * 64
        memory = self._slots[slot]
        if memory is None or memory.nbytes < end:
            self._await(call, stream.now())  # Copies may still read the memory being replaced.
            memory = self._slots[slot] = stream.driver.pinned(end)
        return [
            memory[start : start + part.flat.nbytes].view(part.flat.dtype)
            for start, part in zip(starts, step, strict=True)
        ]

    def _await(self, call: Call, event: CudaEvent) -> None:
        if not wait_until(event.query, call.deadline, self.check_open):
            raise CommunicatorTimeoutError(
                f"{call.header}: waited {call.deadline.seconds:g} s for this rank's device: work"
                " on the array's stream before the call has not ended",
                None,
            )


def _load(stream: DeviceStream, step: Sequence[_StagedPiece], host: Sequence[Flat]) -> CudaEvent:
    """Queue the loads of ``step``; return the event at their end."""
    for part, flat in zip(step, host, strict=True):
        if part.load and flat.size:
            stream.driver.copy_to_host(flat, part.flat.pointer, stream.handle)
    return stream.now()


def _pinned(stream: DeviceStream, flat: DeviceFlat) -> Flat:
    return stream.driver.pinned(flat.nbytes)[: flat.nbytes].view(flat.dtype)


def make_communicator(
    membership: Membership, cpu: CommunicatorFactory = over_tcp
) -> StagedCommunicator:
    """Make a communicator through the host, over the transport ``cpu``."""
    return StagedCommunicator(membership, cpu(membership))
