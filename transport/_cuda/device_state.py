"""The streams and completions of communicators on device memory.

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
"""The seconds that ``close`` waits for the device's running calls."""


class DeviceCommunicator(Communicator[DeviceFlat]):
    """A communicator whose buffers are in device memory."""

    def allocate_on(self, call: Call, driver: Driver, device: int, nbytes: int) -> DeviceMemory:
        """Return uninitialised memory on ``device`` on which collectives are fastest.

        All members must call it with the same ``nbytes``. As with CuPy's own memory, other streams
        may still run earlier work on it. The default is ordinary device memory.
        """
        self.barrier(call)
        return driver.allocate(nbytes, device)


class DeviceStream:
    """A communicator's own stream, which only events order with other streams."""

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self.handle = driver.create_stream(device)
        self._lock = threading.Lock()
        self._running: deque[Completion] = deque()

    def begin(self, flats: Iterable[DeviceFlat]) -> None:
        """Make the stream wait until all ``flats`` may be accessed."""
        for order in _orders(flats):
            self.driver.wait_event(self.handle, order.begin)

    def now(self) -> CudaEvent:
        """Return an event at the end of the work queued so far."""
        event = self.driver.create_event(self.device)
        event.record(self.handle)
        return event

    def end(self, call: Call, flats: Iterable[DeviceFlat], *owners: object) -> Completion:
        """Create the completion of ``call``, store it in the call and in ``flats``, and return it.

        The completion keeps the memory of ``flats``, and ``owners``, alive.
        """
        orders = _orders(flats)
        held = [order.owner for order in orders]
        current = orders[0].current
        completion = Completion(self.driver, self.device, self.handle, current, (*held, *owners))
        for order in orders:
            order.completion = completion
        call.completion = completion
        with self._lock:
            self._drop_ended()
            self._running.append(completion)
        return completion

    def _drop_ended(self) -> None:
        while self._running and self._running[0].over():
            self._running.popleft()

    def close(self) -> None:
        """Destroy the stream; its queued work still runs."""
        self.driver.destroy_stream(self.handle, self.device)


def _orders(flats: Iterable[DeviceFlat]) -> list[StreamOrder]:
    return list({id(flat.order): flat.order for flat in flats}.values())


class DeviceStreams:
    """The streams of one communicator, one for each device and purpose, created at first use."""

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
    """Raise ValueError if the buffers of one call are on several devices."""
    devices = sorted({flat.device for flat in flats})
    if len(devices) > 1:
        named = " and ".join(f"cuda:{device}" for device in devices)
        raise ValueError(
            f"the arrays of one call are on {named}; expected one device: copy the arrays to the"
            " device that this rank uses"
        )


def check_device_of_group(stream: DeviceStream, device: int) -> None:
    """Raise ValueError if ``device`` is not the device of this rank's earlier calls."""
    if device != stream.device:
        raise ValueError(
            f"an array is on cuda:{device}, but this rank's first call on this group was on"
            f" cuda:{stream.device}; expected the same device: copy the array there"
        )
