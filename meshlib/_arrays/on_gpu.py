"""Arrays in a GPU's memory, as flat device buffers without a copy.

Experimental, not run on a GPU (``docs/run/gpu.md``).

This module adapts arrays of any library with ``__cuda_array_interface__``: CuPy, Numba and others.
The interface names the array's current stream in the calling thread, which orders a call after
the array's earlier work, and later work after the call. JAX has no streams of this kind. Its arrays
are converted with DLPack in both directions, whose ``stream`` argument serves the same purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import numpy as np

from meshlib._arrays.adapted import AdaptedArray, read_only
from transport._cuda.driver import Driver, driver_of
from transport._cuda.flat import DeviceFlat, StreamOrder
from transport._operands.reduce_op import Flat

# Special stream numbers of DLPack; CUDA accepts the first as a handle.
_LEGACY_STREAM = 1
_NO_SYNCHRONISATION = -1


class CudaArrays:
    """Arrays with ``__cuda_array_interface__``: used in place when C-contiguous.

    Others are copied to a contiguous array if their class has ``copy(order="C")``, like CuPy's.
    """

    def recognises(self, array: Any) -> bool:
        """Return whether ``array`` is in a GPU's memory."""
        return getattr(array, "__cuda_array_interface__", None) is not None

    def source(self, array: Any, name: str) -> AdaptedArray:
        """Adapt an array that is only read."""
        interface = array.__cuda_array_interface__
        held = array if _is_contiguous(interface, array) else _contiguous_copy(array, name)
        return _adapt(held, array.shape, lambda: array)

    def target(self, array: Any, name: str, *, keep: bool) -> AdaptedArray:
        """Adapt an array that is written; with ``keep``, the call also reads its contents."""
        interface = array.__cuda_array_interface__
        if interface["data"][1]:
            raise read_only(array, name)
        if _is_contiguous(interface, array):
            return _adapt(array, array.shape, lambda: array)
        held = _contiguous_copy(array, name)
        adapted = _adapt(held, array.shape, lambda: array)
        flat = cast(DeviceFlat, adapted.flat)

        def finish() -> Any:
            # Copy back on the call's stream: the caller's stream must not wait before ``wait()``.
            completion = flat.order.completion
            if completion is None:
                array[...] = held
                return array
            with flat.driver.on(flat.device, completion.stream):
                array[...] = held
            completion.extend(flat.order.current, array, held)
            return array

        adapted.finish = finish
        return adapted


def _adapt(array: Any, shape: tuple[int, ...], finish: Callable[[], Any]) -> AdaptedArray:
    flat = device_flat(array)
    return AdaptedArray(cast(Flat, flat), tuple(shape), "cuda", finish)


def device_flat(array: Any) -> DeviceFlat:
    """Return the flat buffer over the C-contiguous ``array``.

    Calls use it after the work that is now on the array's current stream.
    """
    driver = driver_of(array)
    interface = array.__cuda_array_interface__
    pointer = interface["data"][0]
    # An empty array has no memory and so no device, but the call still needs one.
    device = driver.device_of(pointer) if pointer else driver.current_device()

    def current() -> int:
        return _stream_of(array.__cuda_array_interface__, driver, device)

    begin = driver.create_event(device)
    begin.record(_stream_of(interface, driver, device))
    order = StreamOrder(begin, current, array)
    size = math.prod(interface["shape"])
    return DeviceFlat(pointer, size, np.dtype(array.dtype), device, driver, order)


def _stream_of(interface: dict[str, Any], driver: Driver, device: int) -> int:
    stream = interface.get("stream")
    return driver.current_stream(device) if stream is None else stream


def _is_contiguous(interface: dict[str, Any], array: Any) -> bool:
    strides = interface.get("strides")
    if strides is None or 0 in interface["shape"]:
        return True
    expected = np.dtype(array.dtype).itemsize
    for size, stride in zip(reversed(interface["shape"]), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _contiguous_copy(array: Any, name: str) -> Any:
    try:
        return array.copy(order="C")
    except (AttributeError, TypeError):
        raise ValueError(
            f"{name} is not C-contiguous (shape {tuple(array.shape)}), and its class"
            f" {type(array).__qualname__} makes no contiguous copy; expected a contiguous array"
        ) from None


class JaxOnGpu:
    """JAX arrays on one GPU, via CuPy; results are new arrays.

    Neither direction copies data or blocks the host: DLPack orders JAX's work before the call, and
    the call before JAX's later work.
    """

    def recognises(self, array: Any) -> bool:
        """Return whether the JAX array ``array`` is on one GPU, and CuPy is installed."""
        devices = array.devices()
        return (
            len(devices) == 1
            and next(iter(devices)).platform in ("gpu", "cuda")
            and find_spec("cupy") is not None
        )

    def source(self, array: Any, name: str) -> AdaptedArray:
        """Adapt an array that is only read."""
        return _adapt(self._view(array), array.shape, lambda: array)

    def target(self, array: Any, name: str, *, keep: bool) -> AdaptedArray:
        """Adapt an array that a new array will replace."""
        view = self._view(array)
        fresh = view.copy() if keep else import_module("cupy").empty_like(view)
        # An empty array is its own result, because it has no memory to export.
        adapted = _adapt(fresh, array.shape, lambda: array)
        adapted.returned_only = True
        flat = cast(DeviceFlat, adapted.flat)
        if flat.size:
            adapted.finish = lambda: import_module("jax").dlpack.from_dlpack(_Export(fresh, flat))
        return adapted

    def _view(self, array: Any) -> Any:
        return import_module("cupy").from_dlpack(array)


class _Export:
    """A DLPack export of a call's result; the consumer's stream waits for the end of the call."""

    def __init__(self, array: Any, flat: DeviceFlat) -> None:
        self._array = array
        self._flat = flat

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        flat = self._flat
        consumer = _LEGACY_STREAM if stream is None else stream
        if consumer != _NO_SYNCHRONISATION:
            if flat.order.completion is None:
                flat.driver.wait_event(consumer, flat.order.begin)
            else:
                flat.order.completion.join_stream(consumer)
        return self._array.__dlpack__(stream=_NO_SYNCHRONISATION, **options)
