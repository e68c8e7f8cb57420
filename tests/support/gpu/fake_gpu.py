"""A small array library whose arrays are in the device memory of a ``HostMachine``.

It has what CuPy's arrays show to others: ``__cuda_array_interface__`` with the thread's current
stream, ``copy``, item assignment; and, as CuPy's, every operation is only put on a stream.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.support.gpu.host_driver import HostDriver, HostMemory
from transport._waiting.deadline import Deadline


class FakeArray:
    def __init__(
        self,
        driver: HostDriver,
        memory: HostMemory,
        shape: tuple[int, ...],
        dtype: Any,
        strides: tuple[int, ...] | None = None,
        writable: bool = True,
    ) -> None:
        self.__meshlib_driver__ = driver
        self.driver = driver
        self.memory = memory
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.strides = strides
        self.writable = writable

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "strides": self.strides,
            "data": (self.memory.pointer if np.prod(self.shape) else 0, not self.writable),
            "stream": self.driver.current_stream(self.memory.device),
        }

    def _stream(self) -> int:
        return self.driver.current_stream(self.memory.device)

    def view(self) -> np.ndarray[Any, Any]:
        """The array in host memory: for work that is on a stream."""
        whole = self.driver.machine.view(self.memory.pointer, np.uint8, self.memory.nbytes)
        return np.ndarray(self.shape, self.dtype, whole.data, 0, self.strides)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def fill(self, value: Any) -> None:
        self[...] = value

    def reshape(self, count: int) -> FakeArray:
        assert count == -1
        return FakeArray(self.driver, self.memory, (self.size,), self.dtype)

    def __iadd__(self, other: FakeArray) -> FakeArray:
        self._put(lambda: np.add(self.view(), other.view(), out=self.view()), other)
        return self

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        assert function is np.empty_like
        return empty(self.driver, self.shape, self.dtype, self.memory.device)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        (out,), (_, number) = kwargs.pop("out"), inputs
        assert inputs[0] is out is self
        self._put(lambda: ufunc(self.view(), number, out=self.view(), **kwargs))
        return self

    def copy(self, order: str = "C") -> FakeArray:
        assert order == "C"
        fresh = empty(self.driver, self.shape, self.dtype, self.memory.device)
        self._put(lambda: np.copyto(fresh.view(), self.view()), fresh)
        return fresh

    def __setitem__(self, where: Any, value: Any) -> None:
        if isinstance(value, FakeArray):
            self._put(lambda: self.view().__setitem__(where, value.view()), value)
        else:
            self._put(lambda: self.view().__setitem__(where, value))

    def add(self, number: float) -> None:
        """Add ``number`` to all elements, on the current stream."""

        def run() -> None:
            view = self.view()
            view += number

        self._put(run)

    def _put(self, run: Any, *owners: object) -> None:
        def keep() -> None:  # as a stream-ordered allocator keeps memory until its work is done
            run()
            _ = (self, owners)

        self.driver.machine.put(self._stream(), keep)

    def get(self) -> np.ndarray[Any, Any]:
        """Copy to the host, after what is on the current stream."""
        result = np.empty(self.shape, self.dtype)
        self._put(lambda: np.copyto(result, self.view()))
        done = self.driver.create_event(0)
        done.record(self._stream())
        deadline = Deadline.after(30.0)
        while not done.query():
            assert not deadline.expired, "the device never got there"
        return result


def empty(driver: HostDriver, shape: tuple[int, ...], dtype: Any, device: int = 0) -> FakeArray:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return FakeArray(driver, driver.allocate(nbytes, device), shape, dtype)


def array(driver: HostDriver, values: Any, device: int = 0) -> FakeArray:
    values = np.array(values)
    made = empty(driver, values.shape, values.dtype, device)
    made[...] = values
    return made


def transposed(driver: HostDriver, values: Any) -> FakeArray:
    """An array in Fortran order: not C-contiguous."""
    values = np.asfortranarray(values)
    memory = driver.allocate(values.nbytes, 0)
    made = FakeArray(driver, memory, values.shape, values.dtype, values.strides)
    made[...] = values
    return made
