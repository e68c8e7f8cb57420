"""Offers: before a call, members inform each other which memory to read.

Experimental, not run on a GPU (``docs/run/gpu.md``).

An IPC handle identifies a whole allocation, so an offer of an array is a handle, an offset and a
size. The offers are exchanged on the host, by a collective of the CPU transport. Its frames carry
the call's header, so it detects mismatched, late and lost members.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transport._calls.call import Call
from transport._communicators.base import Communicator
from transport._cuda.driver import Driver
from transport._cuda.flat import DeviceFlat
from transport._cuda_ipc.segments import Segments
from transport._errors import DistBackendError, HeaderMismatchError

# Handle (64 bytes in CUDA) and its length; segment, offset, address; bytes offered to the member,
# bytes wanted from it; process; whether the memory can be shared.
_ENTRY = struct.Struct("<64sIiQQQQQ?")
_NO_SEGMENT = -1
_OPEN_AT_MOST = 128

# Handle, segment, offset, and whether the memory can be shared.
_Place = tuple[bytes, int, int, bool]


@dataclass(frozen=True, slots=True)
class Offer:
    """One member's message to another: the memory to read, and the number of bytes to be read back.

    The memory is in a ``segment`` of symmetric memory, or in the allocation of ``handle``.
    """

    handle: bytes
    segment: int
    offset: int
    address: int
    nbytes: int
    wanted: int
    process: int
    shared: bool

    def pack(self) -> bytes:
        """Return the offer as bytes."""
        length = len(self.handle)
        numbers = (self.offset, self.address, self.nbytes, self.wanted, self.process)
        return _ENTRY.pack(self.handle, length, self.segment, *numbers, self.shared)

    @classmethod
    def unpack(cls, data: bytes) -> Offer:
        """Return the offer that ``data`` encodes."""
        handle, length, *others = _ENTRY.unpack(data)
        return cls(handle[:length], *others)


class Offers:
    """One member's end of the exchange, with its mappings of the peers' memory."""

    def __init__(
        self, inner: Communicator, driver: Driver, device: int, segments: Segments
    ) -> None:
        self._inner = inner
        self._segments = segments
        self._driver = driver
        self._device = device
        self._opened: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._held: dict[tuple[int, bytes], int] = {}

    def exchange(
        self, call: Call, offered: Sequence[DeviceFlat | None], wanted: Sequence[int]
    ) -> list[int] | None:
        """Offer ``offered[i]`` to member i; return the address of member i's ``wanted[i]`` bytes.

        Returns None, on all members, if some memory cannot be shared. Raises HeaderMismatchError if
        a member offers or wants another size.
        """
        size = self._inner.size
        places: dict[tuple[int, int], _Place] = {}
        own = b"".join(
            self._offer(flat, nbytes, places).pack()
            for flat, nbytes in zip(offered, wanted, strict=True)
        )
        records = [np.empty(len(own), np.uint8) for _ in range(size)]
        self._inner.all_gather(call, records, np.frombuffer(own, np.uint8))
        table = [
            [
                Offer.unpack(record[i * _ENTRY.size : (i + 1) * _ENTRY.size].tobytes())
                for i in range(size)
            ]
            for record in records
        ]
        self._check(call, table, wanted)
        if not all(offer.shared for offers in table for offer in offers):
            return None
        return [self._address(peer, offers[self._inner.rank]) for peer, offers in enumerate(table)]

    def close(self) -> None:
        """Unmap the peers' memory."""
        for opened in (self._opened, self._held):
            for base in opened.values():
                self._driver.close(base, self._device)
            opened.clear()

    def hold(self) -> None:
        """Keep the present mappings until ``close``; ``trim`` ignores them."""
        self._held.update(self._opened)
        self._opened.clear()

    def _offer(
        self,
        flat: DeviceFlat | None,
        wanted: int,
        places: dict[tuple[int, int], _Place],
    ) -> Offer:
        """Return the offer of ``flat``; ``places`` caches places during a call."""
        process = self._driver.process_id()
        if flat is None or not flat.size:
            return Offer(b"", _NO_SEGMENT, 0, 0, 0, wanted, process, True)
        key = (flat.pointer, flat.nbytes)
        place = places.get(key)
        if place is None:
            place = places[key] = self._place_of(flat)
        handle, segment, offset, shared = place
        return Offer(handle, segment, offset, flat.pointer, flat.nbytes, wanted, process, shared)

    def _place_of(self, flat: DeviceFlat) -> _Place:
        found = self._segments.find(flat.pointer, flat.nbytes)
        if found is not None:
            return b"", *found, True
        try:
            handle, offset = self._driver.share(flat.pointer)
        except DistBackendError:
            return b"", _NO_SEGMENT, 0, False
        return handle, _NO_SEGMENT, offset, True

    def _check(self, call: Call, table: list[list[Offer]], wanted: Sequence[int]) -> None:
        rank, membership = self._inner.rank, self._inner.membership
        for peer, offers in enumerate(table):
            offer, name = offers[rank], membership.describe(peer)
            offered = table[rank][peer].nbytes
            if offer.nbytes != wanted[peer]:
                text = f"{name} sent {offer.nbytes} bytes in {call.header}"
                text += f", expected {wanted[peer]} bytes"
            elif offer.wanted != offered:
                text = f"{name} expects {offer.wanted} bytes from this rank in {call.header},"
                text += f" but this rank sends {offered} bytes"
            else:
                continue
            raise HeaderMismatchError(text, peer, call.header, call.header)

    def _address(self, peer: int, offer: Offer) -> int:
        if offer.segment != _NO_SEGMENT:
            return self._segments.address(peer, offer.segment) + offer.offset
        if offer.process == self._driver.process_id() or not offer.nbytes:
            return offer.address  # A process cannot open its own handles.
        key = (offer.process, offer.handle)
        base = self._held.get(key)
        if base is None:
            base = self._opened.get(key)
            if base is None:
                base = self._opened[key] = self._driver.open(offer.handle, self._device)
            self._opened.move_to_end(key)
        return base + offer.offset

    @property
    def crowded(self) -> bool:
        """True if so many mappings are open that the caller should call ``trim``."""
        return len(self._opened) > _OPEN_AT_MOST

    def trim(self) -> None:
        """Unmap the least recently used mappings. No call may be running."""
        while len(self._opened) > _OPEN_AT_MOST // 2:
            _, base = self._opened.popitem(last=False)
            self._driver.close(base, self._device)
