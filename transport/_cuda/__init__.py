"""Buffers in device memory, the driver beneath them, and their transports.

Experimental, not run on a GPU (``docs/run/gpu.md``).

Nothing here imports CuPy or CUDA until a driver is loaded; see ``docs/run/gpu.md``.
"""

from transport._cuda.completion import Completion
from transport._cuda.driver import Driver, cuda_driver, driver_of
from transport._cuda.flat import DeviceFlat, StreamOrder

__all__ = [
    "Completion",
    "DeviceFlat",
    "Driver",
    "StreamOrder",
    "cuda_driver",
    "driver_of",
]
