"""The operations of a GPU that the transports of device memory need, as one narrow interface.

Experimental, not run on a GPU (``docs/run/gpu.md``).

``CupyDriver`` implements it for CUDA. The tests have another driver: its device memory is the
host's, and its streams are threads that can be delayed. The same protocol code runs over both.

Streams and device addresses are plain ints, as CUDA's own handles are. Every method that takes a
stream only puts work on it and returns; ``CudaEvent.query`` asks, nothing here waits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np

from transport._errors import DistBackendError
from transport._operands.reduce_op import Flat, ReduceOp


class CudaEvent(Protocol):
    """A moment on a stream; freed with its last reference."""

    def record(self, stream: int) -> None:
        """Make the event the moment when all work that ``stream`` has now is done."""
        ...

    def query(self) -> bool:
        """True if the moment has arrived. Raises DistBackendError when the device failed."""
        ...


class DeviceMemory(Protocol):
    """Memory on a device, freed when nobody refers to it any more."""

    pointer: int
    nbytes: int


class Driver(Protocol):
    """The interface of a process to its GPUs."""

    def device_count(self) -> int:
        """Return the number of devices that this process sees."""
        ...

    def device_id(self, device: int) -> str:
        """Return an id of ``device`` that is the same in every process of this host."""
        ...

    def current_device(self) -> int:
        """Return the device that the calling thread has chosen."""
        ...

    def choose_device(self, device: int) -> None:
        """Make ``device`` the calling thread's current one, for good."""
        ...

    def device_of(self, pointer: int) -> int:
        """Return the device whose memory has the address ``pointer``."""
        ...

    def on(self, device: int, stream: int | None = None) -> AbstractContextManager[object]:
        """Make ``device``, and ``stream`` if given, current in the calling thread for a block."""
        ...

    def current_stream(self, device: int) -> int:
        """Return the calling thread's current stream on ``device``."""
        ...

    def create_stream(self, device: int) -> int:
        """Return a new stream, ordered with no other one, not even the default stream."""
        ...

    def destroy_stream(self, stream: int, device: int) -> None:
        """Destroy a stream; its queued work still runs."""
        ...

    def create_event(self, device: int) -> CudaEvent:
        """Return a new event, not recorded yet (``query`` gives true)."""
        ...

    def wait_event(self, stream: int, event: CudaEvent, device: int | None = None) -> None:
        """Make later work on ``stream`` wait for ``event`` as it is recorded now.

        ``device`` is the stream's, if it is not that of the event.
        """
        ...

    def allocate(self, nbytes: int, device: int) -> DeviceMemory:
        """Return ``nbytes`` of device memory with undefined contents."""
        ...

    def scratch(self, nbytes: int, device: int, stream: int) -> DeviceMemory:
        """Return memory for work on ``stream`` alone, of undefined contents.

        It may be dropped before that work is done, without a wait.
        """
        ...

    def array(
        self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: object
    ) -> Any:
        """Return an array (C order) over device memory that lives as long as ``owner`` does.

        It has ``__cuda_array_interface__`` and keeps ``owner``.
        """
        ...

    def pinned(self, nbytes: int) -> Flat:
        """Return page-locked host memory (uint8), free for others with the last view of it.

        Copies that still read or write it then must be over.
        """
        ...

    def copy_to_host(self, into: Flat, pointer: int, stream: int) -> None:
        """Copy device memory into the host buffer ``into``, which is ``pinned``."""
        ...

    def copy_from_host(self, pointer: int, data: Flat, stream: int) -> None:
        """Copy the host buffer ``data``, which is ``pinned``, to device memory."""
        ...

    def copy(self, into: int, pointer: int, nbytes: int, stream: int) -> None:
        """Copy within or between devices. The two must not overlap, unless they are equal."""
        ...

    def can_reduce(self, dtype: np.dtype[Any], inputs: int) -> bool:
        """True if ``reduce`` and ``scale`` take ``dtype``, and that many inputs."""
        ...

    def reduce(
        self,
        out: int,
        inputs: Sequence[int],
        dtype: np.dtype[Any],
        count: int,
        op: ReduceOp,
        stream: int,
    ) -> None:
        """Reduce ``count`` elements at each address of ``inputs`` into ``out``, in this order.

        ``out`` may be one of them. Small floats are reduced in float32 and rounded once; AVG
        divides by the number of inputs. PREMUL_SUM is not an op of this method: see ``scale``.
        """
        ...

    def scale(
        self, out: int, pointer: int, dtype: np.dtype[Any], count: int, factor: Any, stream: int
    ) -> None:
        """Multiply by the number ``factor`` in the reduction's dtype, and round."""
        ...

    def signal(self, addresses: Sequence[int], value: int, stream: int) -> None:
        """Raise the 64-bit flags at ``addresses`` to ``value``, visible after all work before it.

        A flag that is higher already stays as it is.
        """
        ...

    def wait_value(self, addresses: Sequence[int], value: int, stream: int) -> None:
        """Hold ``stream`` until all flags, in memory of this process' own, are >= ``value``."""
        ...

    def process_id(self) -> int:
        """Return an id that differs between processes of one host, among which memory is shared."""
        ...

    def keep(self, memory: object) -> None:
        """Hold ``memory``, on a device or ``pinned``, until the process ends.

        Others may look at it for as long.
        """
        ...

    def share(self, pointer: int) -> tuple[bytes, int]:
        """Return a handle of the allocation around ``pointer``, and the offset in it.

        Raises DistBackendError for memory that cannot be shared between processes.
        """
        ...

    def open(self, handle: bytes, device: int) -> int:
        """Return where the allocation behind another process' ``handle`` begins here."""
        ...

    def close(self, base: int, device: int) -> None:
        """End what ``open`` began."""
        ...


@functools.cache
def cuda_driver() -> Driver:
    """Return this process' driver for CUDA.

    Raises DistBackendError that says what to install when CuPy or a driver is missing.
    """
    try:
        import_module("cupy")
    except ImportError as error:
        raise DistBackendError(
            f"arrays on a GPU need CuPy ({error}); install it with"
            " `pip install 'meshlib-spmd[cuda13]'` (or cuda12), or use arrays on the CPU"
        ) from error
    module = import_module("transport._cuda.cupy_driver")
    return cast(Driver, module.CupyDriver())


def driver_of(array: Any) -> Driver:
    """Return the driver of the array's memory: CUDA's, unless its class brings another one."""
    return getattr(array, "__meshlib_driver__", None) or cuda_driver()
