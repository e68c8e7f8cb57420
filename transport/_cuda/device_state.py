"""The state of every communicator on device memory: memory, one device, a stream, completions.

Experimental, not run on a GPU (``docs/run/gpu.md``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from transport._calls.call import Call
from transport._communicators.base import Communicator
from transport._cuda.completion import Completion
from transport._cuda.driver import CudaEvent, DeviceMemory, Driver
from transport._cuda.flat import DeviceFlat, StreamOrder
from transport._errors import CommunicatorAbortedError

CLOSE_SECONDS = 5.0
"""The time that ``close`` waits for the device's running calls, in seconds."""


class DeviceCommunicator(Communicator[DeviceFlat]):
    """A communicator whose buffers are in device memory."""

    def allocate_on(self, call: Call, driver: Driver, device: int, nbytes: int) -> DeviceMemory:
        """Return memory on ``device`` on which collectives are fastest.

        Every member calls, with the same ``nbytes``. The contents are undefined. Earlier work on
        the memory may still be under way on other streams, as with CuPy's own memory. A transport
        without such memory returns ordinary device memory.
        """
        self.barrier(call)
        return driver.allocate(nbytes, device)


class DeviceStream:
    """A communicator's own stream. Only events order its work with other streams."""

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self.handle = driver.create_stream(device)
        self._lock = threading.Lock()
        self._under_way: deque[Completion] = deque()

    def begin(self, flats: Iterable[DeviceFlat]) -> None:
        """Hold the stream until all ``flats`` may be touched."""
        for order in _orders(flats):
            self.driver.wait_event(self.handle, order.begin)

    def now(self) -> CudaEvent:
        """Return the moment when the stream's present work is done."""
        event = self.driver.create_event(self.device)
        event.record(self.handle)
        return event

    def end(self, call: Call, flats: Iterable[DeviceFlat], *owners: object) -> Completion:
        """Store the completion of ``call`` with it and its ``flats``, and return it.

        Their memory, and ``owners``, live until then, even without other references.
        """
        orders = _orders(flats)
        held = [order.owner for order in orders]
        current = orders[0].current
        completion = Completion(self.driver, self.device, self.handle, current, (*held, *owners))
        for order in orders:
            order.completion = completion
        call.completion = completion
        with self._lock:
            self._forget_what_is_over()
            self._under_way.append(completion)
        return completion

    def _forget_what_is_over(self) -> None:
        while self._under_way and self._under_way[0].over():
            self._under_way.popleft()

    def close(self) -> None:
        """Destroy the stream; its queued work still runs."""
        self.driver.destroy_stream(self.handle, self.device)


def _orders(flats: Iterable[DeviceFlat]) -> list[StreamOrder]:
    return list({id(flat.order): flat.order for flat in flats}.values())


class DeviceStreams:
    """The streams of one communicator: one for each device and purpose, made when first used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[tuple[int, str], DeviceStream] = {}
        self._closed = False

    def get(self, flat: DeviceFlat, purpose: str) -> DeviceStream:
        """Return the stream for ``purpose`` on the device of ``flat``."""
        key = (flat.device, purpose)
        with self._lock:
            if self._closed:
                raise CommunicatorAbortedError("the communicator was closed")
            stream = self._streams.get(key)
            if stream is None:
                stream = self._streams[key] = DeviceStream(flat.driver, flat.device)
            return stream

    def close(self) -> None:
        """Destroy all streams. Idempotent."""
        with self._lock:
            self._closed = True
            streams = list(self._streams.values())
            self._streams.clear()
        for stream in streams:
            stream.close()


def check_one_device(flats: Sequence[DeviceFlat]) -> None:
    """Raise ValueError when the buffers of one call are on several devices."""
    devices = sorted({flat.device for flat in flats})
    if len(devices) > 1:
        named = " and ".join(f"cuda:{device}" for device in devices)
        raise ValueError(
            f"the arrays of one call are on {named}; expected all on one device:"
            " copy them to the device that this rank uses"
        )


def check_device_of_group(stream: DeviceStream, device: int) -> None:
    """Raise ValueError for an array on another ``device`` than this rank's calls before."""
    if device != stream.device:
        raise ValueError(
            f"an array is on cuda:{device}, but this rank's calls on this group are on"
            f" cuda:{stream.device}, the device of its first one; expected that device:"
            " copy the array there"
        )
