"""Buffers in device memory, the driver for them, and shared parts of their transports.

Experimental, not run on a GPU (``docs/run/gpu.md``).

CuPy and CUDA are imported only when a driver is loaded.
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
