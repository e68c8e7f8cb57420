"""Symmetric memory on devices: allocations whose IPC handles the members have exchanged.

Experimental, not run on a GPU (``docs/run/gpu.md``).

A segment has the same number and capacity on all members. Its number and an offset identify memory
in it, without a driver call. A segment is reused once it is free on all members: with each
allocation, members exchange which segments are free. It is deallocated only when its process exits,
because peers may have it mapped until they exit.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from transport._calls.call import Call
from transport._communicators.base import Communicator
from transport._cuda.driver import CudaEvent, DeviceMemory, Driver
from transport._errors import DistBackendError

# Handle (64 bytes in CUDA) and its length; offset, address, process; whether the member allocated a
# new segment; a bit for each of the first segments that is free.
_RECORD = struct.Struct("<64sIQQQ?32s")
_COMPARED = 256
_SMALL, _LARGE = 512, 2 << 20


@dataclass(slots=True, eq=False)
class _DeviceAllocation:
    """An allocation, and where this process maps each member's (empty: it cannot be shared)."""

    memory: DeviceMemory
    capacity: int
    addresses: list[int]
    in_use: bool = True
    last_use: CudaEvent | None = None


class SegmentLease:
    """The use of a segment's memory; releases the segment with its last reference."""

    def __init__(self, segments: Segments, number: int, pointer: int, nbytes: int) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self._segments = segments
        self._number = number

    def __del__(self) -> None:
        self._segments.release(self._number)


class Segments:
    """One member's segments. ``inner`` has the same members."""

    def __init__(self, inner: Communicator, driver: Driver, device: int) -> None:
        self._inner = inner
        self._driver = driver
        self._device = device
        self._lock = threading.Lock()
        self._segments: list[_DeviceAllocation] = []
        self._opened: list[int] = []
        self._places: list[tuple[int, int]] = []

    def allocate(self, call: Call, nbytes: int) -> DeviceMemory:
        """Return ``nbytes`` of a segment, or unshared memory if sharing is impossible.

        All members must call it.
        """
        step = _SMALL if nbytes <= _LARGE else _LARGE
        capacity = max(-(-nbytes // step), 1) * step
        free = self._free()
        number = self._agree(call, capacity, free)
        with self._lock:
            segment = self._segments[number]
            segment.in_use, segment.last_use = True, None
        return SegmentLease(self, number, segment.memory.pointer, nbytes)

    def find(self, pointer: int, nbytes: int) -> tuple[int, int] | None:
        """Return the number of the segment that contains this memory and the offset, or None."""
        with self._lock:
            at = bisect_right(self._places, (pointer, len(self._segments))) - 1
            if at < 0:
                return None
            start, number = self._places[at]
            segment = self._segments[number]
        inside = pointer + nbytes <= start + segment.capacity
        return (number, pointer - start) if inside and segment.addresses else None

    def address(self, member: int, number: int) -> int:
        """Return the address at which this process maps segment ``number`` of ``member``."""
        return self._segments[number].addresses[member]

    def release(self, number: int) -> None:
        """Free the segment for reuse after the work that is now on the current stream."""
        event: CudaEvent | None = None
        with suppress(Exception):  # After a device failure, or at exit, it is not reused.
            event = self._driver.create_event(self._device)
            event.record(self._driver.current_stream(self._device))
        # No lock, because the garbage collector may run this while its thread holds the lock.
        segment = self._segments[number]
        segment.last_use = event
        segment.in_use = event is None

    def close(self) -> None:
        """Unmap the peers' memory. This member's memory stays allocated until its process exits."""
        with self._lock:
            opened, self._opened = self._opened, []
        for base in opened:
            self._driver.close(base, self._device)

    # The implementation.

    def _free(self) -> list[int]:
        with self._lock:
            compared = list(enumerate(self._segments[:_COMPARED]))
        return [
            number
            for number, segment in compared
            if not segment.in_use and (segment.last_use is None or segment.last_use.query())
        ]

    def _agree(self, call: Call, capacity: int, free: list[int]) -> int:
        """Return the number of a segment that is free on all members, or of a new segment.

        A member without a free segment allocates one before the exchange, which often saves a
        second exchange.
        """
        bits = np.zeros(_COMPARED, np.uint8)
        bits[free] = 1
        spare = any(self._segments[number].capacity == capacity for number in free)
        memory = None if spare else self._driver.allocate(capacity, self._device)
        while True:
            records = self._exchange(call, memory, bits)
            shared = np.bitwise_and.reduce(
                [np.frombuffer(record[-1], np.uint8) for record in records]
            )
            free_everywhere = np.flatnonzero(np.unpackbits(shared))
            for number in map(int, free_everywhere):
                if self._segments[number].capacity == capacity:
                    return number
            if all(record[5] for record in records):
                assert memory is not None
                return self._add(memory, capacity, records)
            # Some member has a free segment that is in use on another member.
            if memory is None:
                memory = self._driver.allocate(capacity, self._device)
            bits[:] = 0

    def _exchange(
        self,
        call: Call,
        memory: DeviceMemory | None,
        bits: np.ndarray[tuple[int], np.dtype[np.uint8]],
    ) -> list[tuple[bytes, int, int, int, int, bool, bytes]]:
        handle, offset = b"", 0
        if memory is not None:
            with suppress(DistBackendError):
                handle, offset = self._driver.share(memory.pointer)
        address = 0 if memory is None else memory.pointer
        own = _RECORD.pack(
            handle,
            len(handle),
            offset,
            address,
            self._driver.process_id(),
            memory is not None,
            np.packbits(bits).tobytes(),
        )
        rows = [np.empty(len(own), np.uint8) for _ in range(self._inner.size)]
        self._inner.all_gather(call, rows, np.frombuffer(own, np.uint8))
        return [_RECORD.unpack(row.tobytes()) for row in rows]

    def _add(
        self,
        memory: DeviceMemory,
        capacity: int,
        records: list[tuple[bytes, int, int, int, int, bool, bytes]],
    ) -> int:
        addresses: list[int] = []
        own_process = self._driver.process_id()
        if all(length for _, length, *_ in records):
            for handle, length, offset, address, process, _, _ in records:
                if process == own_process:
                    addresses.append(address)
                    continue
                base = self._driver.open(handle[:length], self._device)
                with self._lock:
                    self._opened.append(base)
                addresses.append(base + offset)
        self._driver.keep(memory)
        with self._lock:
            number = len(self._segments)
            self._segments.append(_DeviceAllocation(memory, capacity, addresses))
            self._places = sorted([*self._places, (memory.pointer, number)])
        return number
