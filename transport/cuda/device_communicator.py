"""What communicators on device memory have beyond the collectives: memory of their own."""

from __future__ import annotations

from transport.call import Call
from transport.communicators.base import Communicator
from transport.cuda.driver import DeviceMemory, Driver
from transport.cuda.flat import DeviceFlat

CLOSE_SECONDS = 5.0
"""How long ``close`` waits for the calls that are under way on the device."""


class DeviceCommunicator(Communicator[DeviceFlat]):
    """A communicator whose buffers are in device memory."""

    def allocate_on(self, call: Call, driver: Driver, device: int, nbytes: int) -> DeviceMemory:
        """Return memory on ``device`` on which collectives are as fast as they can be.

        Every member calls, with the same ``nbytes``. The contents are undefined. What the memory
        was used for before may still be under way on other streams than the current one, as with
        CuPy's own memory. A transport that has no such memory returns ordinary device memory.
        """
        self.barrier(call)
        return driver.allocate(nbytes, device)
