"""The interface to a GPU that the transports for device memory need.

Experimental, not run on a GPU (``docs/run/gpu.md``).

``CupyDriver`` implements it for CUDA. The tests use a driver whose device memory is host memory and
whose streams are threads that can be delayed. The transports run unchanged over both.

Streams and device addresses are ints, like CUDA's handles. Methods with a ``stream`` argument only
queue work on the stream. No method waits; ``CudaEvent.query`` polls.
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
    """A point in a stream's work; freed with its last reference."""

    def record(self, stream: int) -> None:
        """Set the event to the end of all work that is on ``stream`` now."""
        ...

    def query(self) -> bool:
        """Return whether the work is done. Raises DistBackendError if the device failed."""
        ...


class DeviceMemory(Protocol):
    """Memory on a device, freed with its last reference."""

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
        """Return the calling thread's current device."""
        ...

    def choose_device(self, device: int) -> None:
        """Make ``device`` the calling thread's current device."""
        ...

    def device_of(self, pointer: int) -> int:
        """Return the device whose memory has the address ``pointer``."""
        ...

    def on(self, device: int, stream: int | None = None) -> AbstractContextManager[object]:
        """Make ``device``, and ``stream`` if given, current in the calling thread for a block.

        Returns the context manager for the block.
        """
        ...

    def current_stream(self, device: int) -> int:
        """Return the calling thread's current stream on ``device``."""
        ...

    def create_stream(self, device: int) -> int:
        """Return a new stream that synchronises with no other, not even the default stream."""
        ...

    def destroy_stream(self, stream: int, device: int) -> None:
        """Destroy a stream; its queued work still runs."""
        ...

    def create_event(self, device: int) -> CudaEvent:
        """Return a new event. Until it is recorded, ``query`` returns True."""
        ...

    def wait_event(self, stream: int, event: CudaEvent, device: int | None = None) -> None:
        """Make later work on ``stream`` wait for ``event`` as last recorded.

        ``device`` is the stream's device (default: the event's).
        """
        ...

    def allocate(self, nbytes: int, device: int) -> DeviceMemory:
        """Return ``nbytes`` of device memory with undefined contents."""
        ...

    def scratch(self, nbytes: int, device: int, stream: int) -> DeviceMemory:
        """Return uninitialised memory, to be used only by work on ``stream``.

        The caller may drop it before that work is done.
        """
        ...

    def array(
        self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: object
    ) -> Any:
        """Return an array (C order) over device memory that belongs to ``owner``.

        The array has ``__cuda_array_interface__`` and holds a reference to ``owner``.
        """
        ...

    def pinned(self, nbytes: int) -> Flat:
        """Return page-locked host memory (uint8), freed with the last view of it.

        All copies from or to it must be done by then.
        """
        ...

    def copy_to_host(self, into: Flat, pointer: int, stream: int) -> None:
        """Copy device memory into ``into``, a buffer from ``pinned``."""
        ...

    def copy_from_host(self, pointer: int, data: Flat, stream: int) -> None:
        """Copy ``data``, a buffer from ``pinned``, to device memory."""
        ...

    def copy(self, into: int, pointer: int, nbytes: int, stream: int) -> None:
        """Copy ``nbytes`` within or between devices. The two ranges are equal or disjoint."""
        ...

    def can_reduce(self, dtype: np.dtype[Any], inputs: int) -> bool:
        """Return whether ``reduce`` and ``scale`` support ``dtype`` and that many inputs."""
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

        ``out`` may be one of the inputs. 16-bit floats are reduced in float32 and rounded once. AVG
        divides by the number of inputs. PREMUL_SUM is not supported; see ``scale``.
        """
        ...

    def scale(
        self, out: int, pointer: int, dtype: np.dtype[Any], count: int, factor: Any, stream: int
    ) -> None:
        """Multiply ``count`` elements by the number ``factor`` in the reduction dtype; round."""
        ...

    def signal(self, addresses: Sequence[int], value: int, stream: int) -> None:
        """Raise the 64-bit flags at ``addresses`` to ``value``, after all earlier work is visible.

        A flag that is already higher is not changed.
        """
        ...

    def wait_value(self, addresses: Sequence[int], value: int, stream: int) -> None:
        """Make ``stream`` wait until all flags, in this process' own memory, are >= ``value``."""
        ...

    def process_id(self) -> int:
        """Return an id that is unique among the processes of this host, even across containers."""
        ...

    def keep(self, memory: object) -> None:
        """Hold ``memory``, on a device or ``pinned``, until the process ends.

        Other processes may access it until then.
        """
        ...

    def share(self, pointer: int) -> tuple[bytes, int]:
        """Return an IPC handle of the allocation that contains ``pointer``, and the offset in it.

        Raises DistBackendError for memory that cannot be shared between processes.
        """
        ...

    def open(self, handle: bytes, device: int) -> int:
        """Map the allocation of another process' ``handle``; return its address."""
        ...

    def close(self, base: int, device: int) -> None:
        """Unmap an allocation that ``open`` mapped at ``base``."""
        ...


@functools.cache
def cuda_driver() -> Driver:
    """Return this process' driver for CUDA.

    Raises DistBackendError, with what to install, if CuPy or the NVIDIA driver is missing.
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
    """Return the driver of the array's memory: ``__meshlib_driver__`` if set, else CUDA's."""
    return getattr(array, "__meshlib_driver__", None) or cuda_driver()
