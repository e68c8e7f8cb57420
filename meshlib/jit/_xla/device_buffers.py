"""XLA's buffers on a GPU, as arrays in order with the program's stream.

Experimental, not run on a GPU (``docs/run/gpu.md``).

On a GPU a compiled program is a sequence of work that a host thread puts on a stream. That thread
makes the program's calls too. It makes each one after it has queued the earlier work, and before it
queues the later work. So a collective on that stream runs at its place, and the host need not wait.
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
    """Give ``buffers`` as arrays of CuPy's; ``context.stream`` is the current stream meanwhile.

    What the block puts on the current stream comes behind the program's work so far, and the
    program's later work behind it. The arrays are XLA's memory: they may be used by work that the
    program's stream waits for, and by no other.
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
    """Return where XLA's buffer begins (0: nowhere, it is empty)."""
    try:
        return buffer.__cuda_array_interface__["data"][0] or 0
    except Exception:  # noqa: BLE001 (JAX's own kind of error: it has no name for the dtype there)
        # DLPack knows all of them; its struct, whose first field is the address, is the capsule's.
        capsule = buffer.__dlpack__()
        struct = _capsule_pointer(capsule, b"dltensor")
        return ctypes.c_void_p.from_address(struct).value or 0
