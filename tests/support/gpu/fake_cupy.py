"""A stand-in for CuPy on a ``HostMachine``: arrays in its device memory, with NumPy's interface.

A collective is done on the machine's streams, when the end of some work is queried. All
other work waits, before it begins, for what the thread's current stream has: work that should have
been made to wait for a collective, and was not, sees what was there before. Results are new arrays
or views, as CuPy's; like CuPy's, arrays do not become NumPy's by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.support.gpu.host_driver import HostDriver, HostMachine
from transport._waiting.deadline import Deadline

_own: ContextVar[HostDriver] = ContextVar("driver")


def driver() -> HostDriver:
    """The driver of the thread, which is a rank."""
    return _own.get()


def settle() -> None:
    """Wait for what the current stream has now."""
    done = driver().create_event(driver().current_device())
    done.record(driver().current_stream(driver().current_device()))
    deadline = Deadline.after(30.0)
    while not done.query():
        assert not deadline.expired, "the device never got there"


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array: ``view`` is NumPy's, over the device's memory, which ``owner`` keeps."""

    __module__ = "cupy"

    def __init__(self, view: np.ndarray[Any, Any], owner: Any) -> None:
        self.view_ = view
        self.owner = owner
        self.__meshlib_driver__ = driver()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        view = self.view_
        return {
            "version": 3,
            "shape": view.shape,
            "typestr": view.dtype.str,
            "strides": None if view.flags.c_contiguous else view.strides,
            "data": (view.ctypes.data if view.size else 0, False),
            "stream": self.__meshlib_driver__.current_stream(self.device.id),
        }

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _call(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, function: Any, _: Any, args: Any, kwargs: Any) -> Any:
        return _call(function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.view_, name)
        if not callable(found) or isinstance(found, np.ndarray):
            return _wrap(found, [self])
        anywhere = name == "reshape"
        return lambda *args, **kwargs: _call(found, args, kwargs, [self], anywhere=anywhere)

    def __getitem__(self, key: Any) -> Any:
        return _call(self.view_.__getitem__, (key,), {}, [self], anywhere=True)

    def __setitem__(self, key: Any, value: Any) -> None:
        _call(self.view_.__setitem__, (key, value), {}, [self])

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self.view_)))

    def __len__(self) -> int:
        return len(self.view_)

    def __bool__(self) -> bool:
        settle()
        return bool(self.view_)

    def __float__(self) -> float:
        settle()
        return float(self.view_)

    def __int__(self) -> int:
        settle()
        return int(self.view_)

    def get(self) -> np.ndarray[Any, Any]:
        """Return a copy on the host."""
        settle()
        return self.view_.copy()

    def copy(self, order: str = "C") -> ndarray:
        """Return a copy in new memory."""
        settle()
        return _new(self.view_.copy(order))

    @property
    def device(self) -> Any:
        """What CuPy says."""
        return SimpleNamespace(id=getattr(self.owner, "device", driver().current_device()))


class _Pooled:
    """Memory of the pool: once released, its stream may use it again."""

    def __init__(self, nbytes: int) -> None:
        self.device = driver().current_device()
        self._machine = driver().machine
        self._stream = driver().current_stream(self.device)
        self._memory = driver().allocate(nbytes, self.device)
        self.pointer = self._memory.pointer

    def __del__(self) -> None:
        memory, self._memory = [self._memory], None
        self._machine.put(self._stream, memory.clear)


def _new(values: np.ndarray[Any, Any]) -> ndarray:
    """Put ``values`` into new device memory."""
    values = np.asarray(values)
    memory = _Pooled(values.nbytes)
    raw = driver().machine.view(memory.pointer, np.uint8, values.nbytes)
    order = "F" if values.flags.f_contiguous and not values.flags.c_contiguous else "C"
    view = np.ndarray(values.shape, values.dtype, raw.data, order=order)
    view[...] = values
    return ndarray(view, memory)


def _bare(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value.view_
    if isinstance(value, list | tuple):
        return type(value)(map(_bare, value))
    return value


def _arrays_in(value: Any) -> Iterator[ndarray]:
    if isinstance(value, ndarray):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _arrays_in(part)


def _wrap(result: Any, owners: list[ndarray]) -> Any:
    if isinstance(result, tuple):
        return tuple(_wrap(part, owners) for part in result)
    if isinstance(result, np.generic):
        result = np.asarray(result)
    if not isinstance(result, np.ndarray):
        return result
    for owner in owners:
        if result is owner.view_:
            return owner
        if result.size and np.may_share_memory(result, owner.view_):
            return ndarray(result, owner.owner)
    return _new(result)


def _call(
    function: Any,
    args: Any,
    kwargs: Any,
    owners: list[ndarray] | None = None,
    *,
    anywhere: bool = False,
) -> Any:
    arrays = [*(owners or []), *_arrays_in(list(args)), *_arrays_in(list(kwargs.values()))]
    if arrays and _own.get(None) is None:
        _own.set(arrays[0].__meshlib_driver__)  # a thread of a rank's, such as a group's
    # What makes no views runs on the current device, and reaches no other one's memory.
    current = driver().current_device()
    devices = [array.device.id for array in arrays]
    assert anywhere or set(devices) <= {current}, f"on {current}, of arrays on {devices}"
    settle()
    result = function(*map(_bare, args), **{name: _bare(value) for name, value in kwargs.items()})
    return _wrap(result, arrays)


class _Stream:
    def __init__(self, non_blocking: bool = False, handle: int | None = None) -> None:
        self.ptr = driver().create_stream(0) if handle is None else handle
        self._entered: list[Any] = []

    def __enter__(self) -> _Stream:
        entered = driver().on(driver().current_device(), self.ptr)
        entered.__enter__()
        self._entered.append(entered)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(*error)

    def synchronize(self) -> None:
        """Wait for it on the host."""
        with self:
            settle()


class _Module(ModuleType):
    """The module ``cupy``: NumPy's functions, whose results are on the device."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(np, name)
        if not callable(found) or isinstance(found, type | np.dtype):
            return found
        return lambda *args, **kwargs: _call(found, args, kwargs)


def module() -> ModuleType:
    """Return a module to be found as ``cupy``."""
    made = _Module("cupy")
    made.ndarray = ndarray

    def asarray(value: Any, dtype: Any = None) -> ndarray:
        if isinstance(value, ndarray) and dtype in (None, value.dtype):
            return value
        settle()
        return _new(np.asarray(_bare(value), dtype))

    def current() -> _Stream:
        return _Stream(handle=driver().current_stream(driver().current_device()))

    made.asarray = made.array = asarray
    made.cuda = SimpleNamespace(Stream=_Stream, get_current_stream=current)
    return made


@contextmanager
def as_rank(machine: HostMachine, device: int) -> Iterator[HostDriver]:
    """Make the calling thread a rank on ``device``."""
    made: Any = HostDriver(machine)
    made.choose_device(device)
    made.array = _array
    token = _own.set(made)
    try:
        yield made
    finally:
        _own.reset(token)


def _array(pointer: int, shape: Any, dtype: Any, device: int, owner: Any) -> ndarray:
    count = int(np.prod(shape, dtype=int))
    return ndarray(driver().machine.view(pointer, dtype, count).reshape(shape), owner)
