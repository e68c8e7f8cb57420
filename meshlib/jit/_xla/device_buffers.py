"""XLA's buffers on a GPU, as arrays in order with the program's stream.

Experimental, not run on a GPU (``docs/run/gpu.md``).

On a GPU a compiled program is a sequence of work that a host thread queues on a stream. That thread
also makes the program's calls, each after the earlier work is queued and before the later work. So
a collective on that stream runs in order with this work, and the host need not wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from transport._cuda.driver import Driver, cuda_driver

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


@contextmanager
def on_program_stream(
    context: Any, buffers: Sequence[Any], driver: Driver | None = None
) -> Generator[list[Any]]:
    """Yield ``buffers`` as CuPy arrays, and make ``context.stream`` the current stream.

    Work that the block queues on the current stream runs after the program's earlier work and
    before its later work. The arrays are XLA's memory: only work that the program's stream waits
    for may use them.
    """
    driver = driver or cuda_driver()
    addresses = [_address(buffer) for buffer in buffers]
    device = next((driver.device_of(at) for at in addresses if at), driver.current_device())
    with driver.on(device, context.stream):
        yield [
            driver.array(at, tuple(buffer.shape), buffer.dtype, device, buffer)
            for at, buffer in zip(addresses, buffers, strict=True)
        ]


def _address(buffer: Any) -> int:
    """Return the address of XLA's buffer, 0 for an empty one."""
    try:
        return buffer.__cuda_array_interface__["data"][0] or 0
    except Exception:  # noqa: BLE001 (JAX's error for a dtype that this interface lacks)
        # DLPack has all dtypes; the address is the first field of the capsule's struct.
        capsule = buffer.__dlpack__()
        struct = _capsule_pointer(capsule, b"dltensor")
        return ctypes.c_void_p.from_address(struct).value or 0
