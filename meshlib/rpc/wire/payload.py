"""What travels as pickle, protocol 5, with the memory of arrays beside it."""

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
"""Arrays of fewer bytes are pickled with the rest: a copy costs less than a piece of its own."""

Reduce = Callable[[Any], Any]


class Payload(NamedTuple):
    """An object as it travels: the pickle, and the memory of its arrays."""

    data: bytes
    buffers: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return len(self.data) + sum(buffer.nbytes for buffer in self.buffers)


def load(data: bytes | memoryview, buffers: Sequence[memoryview] = ()) -> Any:
    """Return the object in a payload. Arrays lie in the memory of ``buffers``."""
    return pickle.loads(data, buffers=buffers)


class Pickling:
    """Makes payloads of objects. Knows the types that copy their memory when they are pickled.

    A pickler that has a table of its own is slower, so there is none until one is needed. Any
    thread.
    """

    def __init__(self) -> None:
        self._table: dict[type, Reduce] | None = None
        self._known: tuple[bool, bool, int] = (False, False, -1)

    def dump(self, value: object) -> Payload:
        """Return ``value`` as a payload, whose buffers are the arrays' own memory.

        Raises what pickle raises for what cannot be pickled.
        """
        buffers: list[memoryview] = []

        def keep(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < IN_BAND_BYTES:
                return True
            buffers.append(raw)
            return False

        modules = sys.modules
        known = "jax" in modules, "cupy" in modules, len(copyreg.dispatch_table)
        if known != self._known:
            self._table = _table()
            self._known = known
        if self._table is None:
            return Payload(pickle.dumps(value, 5, buffer_callback=keep), buffers)
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, 5, buffer_callback=keep)
        pickler.dispatch_table = self._table
        pickler.dump(value)
        return Payload(stream.getvalue(), buffers)


def _table() -> dict[type, Reduce] | None:
    table: dict[type, Reduce] = {}
    jax_arrays = getattr(sys.modules.get("jax._src.array"), "ArrayImpl", None)
    if jax_arrays is not None:
        table[jax_arrays] = _reduce_jax
    cupy_arrays = getattr(sys.modules.get("cupy"), "ndarray", None)
    if cupy_arrays is not None:
        table[cupy_arrays] = _reduce_cupy
    return {**copyreg.dispatch_table, **table} if table else None


def _reduce_jax(array: Any) -> Any:
    # Of what has no dtype of its own (jnp.asarray(1)), and of parts of arrays on other processes,
    # JAX knows best itself.
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
