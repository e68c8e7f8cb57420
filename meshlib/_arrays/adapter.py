"""The array adapter: any library's array as a flat buffer, and back.

Only this package contains code for array libraries. It never imports one that the caller has not
imported: an array exists only if its library is loaded. Each library has one small class; the first
class that recognises an array adapts it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from meshlib._arrays.adapted import AdaptedArray, ArrayLibrary, read_only
from meshlib._arrays.on_gpu import CudaArrays, JaxOnGpu
from transport._operands.reduce_op import Flat


class _NumPy:
    """NumPy arrays: used in place when C-contiguous, else through a contiguous copy.

    For a subclass of ``ndarray``, the elements of ``np.asarray`` are sent. A masked array keeps its
    mask, and its masked elements are included.
    """

    def recognises(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def source(self, array: np.ndarray[Any, Any], name: str) -> AdaptedArray:
        return AdaptedArray(_plain(array).ravel(), array.shape, "cpu", lambda: array)

    def target(self, array: np.ndarray[Any, Any], name: str, *, keep: bool) -> AdaptedArray:
        plain = _plain(array)
        flags = plain.flags
        if not flags.writeable:
            raise read_only(array, name)
        if flags.c_contiguous:
            return AdaptedArray(plain.ravel(), array.shape, "cpu", lambda: array)
        flat = plain.flatten() if keep else np.empty(plain.size, plain.dtype)

        def finish() -> np.ndarray[Any, Any]:
            plain[...] = flat.reshape(plain.shape)
            return array

        return AdaptedArray(flat, array.shape, "cpu", finish, writes_back=True)


def _plain(array: np.ndarray[Any, Any]) -> Flat:
    """Return ``array`` without the behaviour of a subclass.

    Some subclasses redefine ``ravel``, ``len`` or assignment: an ``np.matrix`` always has two
    dimensions, and a masked array copies its mask.
    """
    return array if type(array) is np.ndarray else array.view(np.ndarray)


class _NumPyScalar:
    """NumPy scalars (``np.float64(1)``): immutable, so the result is a new scalar."""

    def recognises(self, array: Any) -> bool:
        return isinstance(array, np.generic)

    def source(self, array: np.generic, name: str) -> AdaptedArray:
        return self.target(array, name, keep=True)

    def target(self, array: np.generic, name: str, *, keep: bool) -> AdaptedArray:
        flat = np.array([array])
        return AdaptedArray(flat, (), "cpu", lambda: flat[0], returned_only=True)


class _Jax:
    """JAX arrays: read through a view of their memory on the CPU; results are new arrays.

    Arrays on a device that ``JaxOnGpu`` does not support are copied to the host.
    """

    def recognises(self, array: Any) -> bool:
        jax = sys.modules.get("jax")
        return jax is not None and isinstance(array, jax.Array)

    def source(self, array: Any, name: str) -> AdaptedArray:
        self._refuse_tracer(array, name)
        if _JAX_ON_GPU.recognises(array):
            return _JAX_ON_GPU.source(array, name)
        host = np.asarray(array)
        return AdaptedArray(
            np.ascontiguousarray(host).reshape(-1), host.shape, "cpu", lambda: array
        )

    def target(self, array: Any, name: str, *, keep: bool) -> AdaptedArray:
        self._refuse_tracer(array, name)
        if _JAX_ON_GPU.recognises(array):
            return _JAX_ON_GPU.target(array, name, keep=keep)
        shape: tuple[int, ...] = tuple(array.shape)
        flat = np.array(array).reshape(-1) if keep else np.empty(array.size, array.dtype)

        def finish() -> Any:
            # An uncommitted array stays uncommitted: JAX may still move it between devices.
            where = array.sharding if array.committed else None
            return sys.modules["jax"].device_put(flat.reshape(shape), where)

        return AdaptedArray(flat, shape, "cpu", finish, returned_only=True)

    def _refuse_tracer(self, array: Any, name: str) -> None:
        jax = sys.modules["jax"]
        if isinstance(array, jax.core.Tracer):
            raise TypeError(
                f"{name} is traced by jax.jit (or grad, vmap): it has no values yet; "
                "expected a concrete jax.Array. Inside of jit, use the collectives of meshlib.jit."
            )


class _BufferProtocol:
    """``bytearray``, ``array.array``, ``memoryview`` …: typed by their buffer format."""

    def recognises(self, array: Any) -> bool:
        try:
            memoryview(array)
        except TypeError:
            return False
        return True

    def source(self, array: Any, name: str) -> AdaptedArray:
        adapted = _NUMPY.source(np.asarray(memoryview(array)), name)
        adapted.finish = lambda: array
        return adapted

    def target(self, array: Any, name: str, *, keep: bool) -> AdaptedArray:
        adapted = _NUMPY.target(np.asarray(memoryview(array)), name, keep=keep)
        write_back = adapted.finish

        def finish() -> Any:
            write_back()
            return array

        adapted.finish = finish
        return adapted


_NUMPY = _NumPy()
_JAX_ON_GPU = JaxOnGpu()
_IMMUTABLE: tuple[ArrayLibrary, ...] = (_NumPyScalar(), _Jax())
_LIBRARIES: tuple[ArrayLibrary, ...] = (_NUMPY, *_IMMUTABLE, CudaArrays(), _BufferProtocol())


def _library(array: Any, name: str) -> ArrayLibrary:
    if type(array) is np.ndarray:  # fast path
        return _NUMPY
    for library in _LIBRARIES:
        if library.recognises(array):
            return library
    raise TypeError(
        f"{name} must be a NumPy, JAX or CuPy array, or an object with the buffer protocol; got"
        f" {_type_name(array)}{_instead(array, name)}"
    )


def _type_name(array: Any) -> str:
    cls = type(array)
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"


def _instead(array: Any, name: str) -> str:
    """Return advice for an argument that is not an array."""
    if isinstance(array, int | float | complex):
        return f". Write {name}=np.array({array!r}) for a number"
    return ". Objects have calls of their own: all_gather_object, broadcast_object_list, ..."


def is_only_returned(result: Any) -> bool:
    """Return whether ``result`` is read-only, so that only the returned array has the values."""
    if result is None or type(result) in (np.ndarray, list):  # fast path
        return False
    return any(library.recognises(result) for library in _IMMUTABLE)


def source(array: Any, name: str) -> AdaptedArray:
    """Adapt ``array``, which is only read; raise TypeError, which has ``name``, for a non-array."""
    return _library(array, name).source(array, name)


def target(array: Any, name: str) -> AdaptedArray:
    """Adapt ``array``, which is written and not read.

    Raises TypeError, which has ``name``, for a non-array and a read-only array.
    """
    return _library(array, name).target(array, name, keep=False)


def in_place(array: Any, name: str, instead: str) -> AdaptedArray:
    """Adapt ``array`` as ``target`` does, for a call that does not return it.

    Raises TypeError, which proposes ``instead``, for an array that cannot be written to.
    """
    adapted = target(array, name)
    if adapted.returned_only:
        raise TypeError(
            f"{name} is of type {_type_name(array)}, which cannot be written to;"
            f" expected a writable array, or {instead}"
        )
    return adapted


def in_out(array: Any, name: str) -> AdaptedArray:
    """Adapt ``array``, which is read and then written. Raises the errors of ``target``."""
    return _library(array, name).target(array, name, keep=True)
