"""Pickling with protocol 5, with the memory of arrays out of band."""

from __future__ import annotations

import copyreg
import importlib
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

IN_BAND_BYTES = 2048
"""The bytes below which arrays are pickled in band: a copy costs less than another buffer."""

Reduce = Callable[[Any], Any]


class Payload(NamedTuple):
    """A pickled object: the pickle, and the memory of its arrays."""

    data: bytes
    buffers: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """The bytes of the pickle and the buffers together."""
        return len(self.data) + sum(buffer.nbytes for buffer in self.buffers)


def load(data: bytes | memoryview, buffers: Sequence[memoryview] = ()) -> Any:
    """Return the pickled object, with arrays in the memory of ``buffers``."""
    return pickle.loads(data, buffers=buffers)


def dump(value: object) -> Payload:
    """Return ``value`` pickled, with buffers that are the arrays' own memory.

    Raises the errors of ``pickle``.
    """
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < IN_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    table = _table()
    if not table:  # a pickler with its own table is slower
        return Payload(pickle.dumps(value, 5, buffer_callback=keep), buffers)
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, 5, buffer_callback=keep)
    pickler.dispatch_table = {**copyreg.dispatch_table, **table}
    pickler.dump(value)
    return Payload(stream.getvalue(), buffers)


def _table() -> dict[type, Reduce]:
    """Return reducers for array types whose own ``__reduce__`` copies their memory."""
    table: dict[type, Reduce] = {}
    jax_arrays = getattr(sys.modules.get("jax._src.array"), "ArrayImpl", None)
    if jax_arrays is not None:
        table[jax_arrays] = _reduce_jax
    cupy_arrays = getattr(sys.modules.get("cupy"), "ndarray", None)
    if cupy_arrays is not None:
        table[cupy_arrays] = _reduce_cupy
    return table


def _reduce_jax(array: Any) -> Any:
    # JAX's own __reduce__ keeps weak types (jnp.asarray(1)), and raises for other processes' parts.
    if array.weak_type or not array.is_fully_addressable:
        return array.__reduce__()
    return _to_jax, (np.asarray(array),)


def _to_jax(host: Any) -> Any:
    import jax

    return jax.device_put(host)


def _reduce_cupy(array: Any) -> Any:
    return _to_cupy, (array.get(),)


def _to_cupy(host: Any) -> Any:
    return importlib.import_module("cupy").asarray(host)
