"""The driver for CUDA, via CuPy's runtime interface.

Experimental, not run on a GPU (``docs/run/gpu.md``).

Imported only if CuPy is installed. ``transport/_cuda/driver.py`` documents the interface.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

import numpy as np

from transport._cuda.kernel_source import MAX_INPUTS, knows
from transport._cuda.kernels import Kernels
from transport._errors import DistBackendError
from transport._operands.reduce_op import Flat, ReduceOp

cupy: Any = import_module("cupy")
_runtime: Any = cupy.cuda.runtime

_COPY_TO_DEVICE, _COPY_TO_HOST, _COPY_ON_DEVICE = 1, 2, 3
_EVENT_WITHOUT_TIME = 2
_STREAM_NON_BLOCKING = 1
_DONE, _NOT_READY = 0, 600
_AT_LEAST = 0
# The first version with ``Stream.from_external``, and with NCCL's unique id as bytes.
_OLDEST_CUPY = 14


def _explained(error: Exception) -> DistBackendError:
    text = str(error)
    if "InsufficientDriver" in text:
        hint = (
            "this host has no NVIDIA driver, or one that is older than CuPy's CUDA;"
            " install a newer driver, or the CuPy of an older CUDA (cupy-cuda12x)"
        )
    elif "NoDevice" in text:
        hint = "no GPU is visible to this process; see CUDA_VISIBLE_DEVICES"
    elif "MemoryAllocation" in text:
        hint = "the device has no memory left"
    else:
        hint = "reported by the device; later calls on it fail as well"
    return DistBackendError(f"CUDA: {text} ({hint})")


@contextmanager
def _errors() -> Any:
    try:
        yield
    except (_runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
        raise _explained(error) from error


class _Handle:
    """A stream's handle, as an object with CUDA's Python protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _external(stream: int) -> Any:
    """Return CuPy's stream for a handle."""
    return cupy.cuda.Stream.from_external(_Handle(stream))


class _CupyEvent:
    def __init__(self, device: int) -> None:
        self.device = device
        with _errors(), cupy.cuda.Device(device):
            self.handle: int = _runtime.eventCreateWithFlags(_EVENT_WITHOUT_TIME)

    def record(self, stream: int) -> None:
        with _errors(), cupy.cuda.Device(self.device):
            _runtime.eventRecord(self.handle, stream)

    def query(self) -> bool:
        # CuPy's eventQuery returns CUDA's status instead of raising.
        with _errors(), cupy.cuda.Device(self.device):
            status: int = _runtime.eventQuery(self.handle)
            if status not in (_DONE, _NOT_READY):
                raise _runtime.CUDARuntimeError(status)
        return status == _DONE

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle is not None and _runtime is not None:
            try:
                _runtime.eventDestroy(handle)
            except _runtime.CUDARuntimeError:
                return  # The device failed or the interpreter is exiting: the event is gone.


class _CupyMemory:
    """CuPy's ``memory``, which lives as long as this object."""

    def __init__(self, memory: Any, nbytes: int) -> None:
        self._owner = memory
        self.pointer: int = memory.ptr
        self.nbytes = nbytes


class CupyDriver:
    """A driver for this process' GPUs through CuPy. Each instance compiles its own kernels."""

    def __init__(self) -> None:
        if int(cupy.__version__.partition(".")[0]) < _OLDEST_CUPY:
            raise DistBackendError(
                f"CuPy {cupy.__version__} is too old; expected {_OLDEST_CUPY} or newer: update the"
                " package cupy-cuda12x or cupy-cuda13x"
            )
        self._kernels = Kernels(cupy)
        self._cuda: Any = None
        self._front_end_waits = False
        with suppress(DistBackendError):
            self._front_end_waits = hasattr(self._libcuda(), "cuStreamWaitValue64_v2")
        self._kept: list[Any] = []

    def device_count(self) -> int:
        with _errors():
            return _runtime.getDeviceCount()

    def device_id(self, device: int) -> str:
        with _errors():
            # MIG instances of one GPU share its PCI address but have different UUIDs.
            uuid: bytes = _runtime.getDeviceProperties(device).get("uuid", b"")
            return f"{_runtime.deviceGetPCIBusId(device)}/{uuid.hex()}"

    def current_device(self) -> int:
        with _errors():
            return _runtime.getDevice()

    def choose_device(self, device: int) -> None:
        with _errors():
            cupy.cuda.Device(device).use()

    def device_of(self, pointer: int) -> int:
        with _errors():
            return _runtime.pointerGetAttributes(pointer).device

    def on(self, device: int, stream: int | None = None) -> AbstractContextManager[object]:
        stack = ExitStack()
        with _errors():
            stack.enter_context(cupy.cuda.Device(device))
            if stream is not None:
                stack.enter_context(_external(stream))
        return stack

    def current_stream(self, device: int) -> int:
        with _errors():
            return cupy.cuda.get_current_stream(device).ptr

    def create_stream(self, device: int) -> int:
        with _errors(), cupy.cuda.Device(device):
            return _runtime.streamCreateWithFlags(_STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: int, device: int) -> None:
        with _errors(), cupy.cuda.Device(device):
            _runtime.streamDestroy(stream)

    def create_event(self, device: int) -> _CupyEvent:
        return _CupyEvent(device)

    def wait_event(self, stream: int, event: Any, device: int | None = None) -> None:
        # A default stream has the same handle on all devices, and means the current device's.
        with _errors(), cupy.cuda.Device(event.device if device is None else device):
            _runtime.streamWaitEvent(stream, event.handle)

    def allocate(self, nbytes: int, device: int) -> _CupyMemory:
        # Not from CuPy's pool: IPC shares whole allocations.
        with _errors(), cupy.cuda.Device(device):
            return _CupyMemory(cupy.cuda.Memory(max(nbytes, 1)), nbytes)

    def scratch(self, nbytes: int, device: int, stream: int) -> _CupyMemory:
        # CuPy's pool reuses freed memory only for later work on the same stream. Freeing to the
        # pool does not synchronise, while cudaFree waits for all running work.
        with self.on(device, stream), _errors():
            return _CupyMemory(cupy.cuda.alloc(max(nbytes, 1)), nbytes)

    def array(
        self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: object
    ) -> Any:
        nbytes = math.prod(shape) * dtype.itemsize
        with _errors(), cupy.cuda.Device(device):
            memory = cupy.cuda.UnownedMemory(pointer, nbytes, owner, device)
            return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def pinned(self, nbytes: int) -> Flat:
        # From CuPy's pool, because cudaFreeHost would wait for all running work.
        with _errors():
            memory = cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
        return np.frombuffer(memory, np.uint8, max(nbytes, 1))[:nbytes]

    def copy_to_host(self, into: Flat, pointer: int, stream: int) -> None:
        with _errors():
            _runtime.memcpyAsync(into.ctypes.data, pointer, into.nbytes, _COPY_TO_HOST, stream)

    def copy_from_host(self, pointer: int, data: Flat, stream: int) -> None:
        with _errors():
            _runtime.memcpyAsync(pointer, data.ctypes.data, data.nbytes, _COPY_TO_DEVICE, stream)

    def copy(self, into: int, pointer: int, nbytes: int, stream: int) -> None:
        if into != pointer and nbytes:
            with _errors():
                _runtime.memcpyAsync(into, pointer, nbytes, _COPY_ON_DEVICE, stream)

    def can_reduce(self, dtype: np.dtype[Any], inputs: int) -> bool:
        return knows(dtype) and inputs <= MAX_INPUTS

    def reduce(
        self,
        out: int,
        inputs: Sequence[int],
        dtype: np.dtype[Any],
        count: int,
        op: ReduceOp,
        stream: int,
    ) -> None:
        with _errors(), _external(stream):
            self._kernels.reduce(out, inputs, dtype, count, op)

    def scale(
        self, out: int, pointer: int, dtype: np.dtype[Any], count: int, factor: Any, stream: int
    ) -> None:
        with _errors(), _external(stream):
            self._kernels.scale(out, pointer, dtype, count, factor)

    def signal(self, addresses: Sequence[int], value: int, stream: int) -> None:
        with _errors(), _external(stream):
            self._kernels.on_flags("signal_flags", addresses, value)

    def wait_value(self, addresses: Sequence[int], value: int, stream: int) -> None:
        # The GPU's front end waits without occupying the GPU. A waiting kernel would block other
        # processes for its whole time slice.
        if self._front_end_waits:
            wait: Any = self._libcuda().cuStreamWaitValue64_v2
            for address in addresses:
                arguments = ctypes.c_uint64(address), ctypes.c_uint64(value)
                if wait(ctypes.c_void_p(stream), *arguments, _AT_LEAST):
                    self._front_end_waits = False
                    break
            else:
                return
        with _errors(), _external(stream):
            self._kernels.on_flags("wait_for_flags", addresses, value)

    def process_id(self) -> int:
        # Ranks in different containers of a host may have the same process id.
        with suppress(OSError):
            return os.stat("/proc/self/ns/pid").st_ino % (1 << 32) << 32 | os.getpid()
        return os.getpid()

    def keep(self, memory: Any) -> None:
        self._kept.append(memory)

    def share(self, pointer: int) -> tuple[bytes, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        device = self.device_of(pointer)
        with _errors(), cupy.cuda.Device(device):
            # The driver API needs a context in this thread, which may be new.
            _runtime.setDevice(device)
            status = self._libcuda().cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer)
            )
            if status:
                raise DistBackendError(f"CUDA: no allocation at {pointer:#x} (error {status})")
            return _runtime.ipcGetMemHandle(base.value), pointer - base.value

    def open(self, handle: bytes, device: int) -> int:
        with _errors(), cupy.cuda.Device(device):
            try:
                return _runtime.ipcOpenMemHandle(handle)
            except _runtime.CUDARuntimeError as error:
                raise DistBackendError(
                    f"CUDA: {error} (cuda:{device} cannot access the memory of a peer's GPU: the"
                    " GPUs have no peer access, or the processes have no common IPC namespace; use"
                    " backend 'cuda:nccl' or 'cuda:staged')"
                ) from error

    def close(self, base: int, device: int) -> None:
        with _errors(), cupy.cuda.Device(device):
            _runtime.ipcCloseMemHandle(base)

    def _libcuda(self) -> Any:
        if self._cuda is None:
            try:
                self._cuda = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise DistBackendError(
                    f"CUDA: {error} (this host has no NVIDIA driver; install one)"
                ) from error
        return self._cuda
