"""Kernels that CuPy compiles, and launches on its current stream.

Experimental, not run on a GPU (``docs/run/gpu.md``).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from transport._cuda.kernel_source import (
    FLAGS,
    MAX_INPUTS,
    PRELUDE,
    knows,
    reduce_kernel_name,
    scale_name,
    source_of,
)
from transport._operands.reduce_op import ReduceOp

_THREADS = 256
_MOST_BLOCKS = 1024
OPTIONS = ("--std=c++14",)


class Kernels:
    """The kernels for all dtypes and operations, compiled for a dtype at its first use."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._lock = threading.Lock()
        self._modules: dict[str, Any] = {}

    def reduce(
        self, out: int, inputs: Sequence[int], dtype: np.dtype[Any], count: int, op: ReduceOp
    ) -> None:
        """Reduce the buffers at ``inputs`` into ``out``; see ``Driver.reduce``."""
        kernel = self._get(dtype, reduce_kernel_name(dtype.name, op.kind))
        arguments = (np.uint64(out), *_padded(inputs), np.int32(len(inputs)), np.uint64(count))
        self._launch(kernel, dtype, count, arguments)

    def scale(self, out: int, pointer: int, dtype: np.dtype[Any], count: int, factor: Any) -> None:
        """Multiply the buffer at ``pointer`` by ``factor`` into ``out``; see ``Driver.scale``."""
        number = complex(factor)
        kernel = self._get(dtype, scale_name(dtype.name))
        parts = np.float64(number.real), np.float64(number.imag)
        arguments = (np.uint64(out), np.uint64(pointer), np.uint64(count), *parts)
        self._launch(kernel, dtype, count, arguments)

    def on_flags(self, name: str, addresses: Sequence[int], value: int) -> None:
        """Launch the kernel ``name`` of ``FLAGS``, which raises flags or waits for them."""
        kernel = self._module("", FLAGS).get_function(name)
        for start in range(0, len(addresses), MAX_INPUTS):
            some = addresses[start : start + MAX_INPUTS]
            arguments = (np.int32(len(some)), np.uint64(value))
            kernel((1,), (MAX_INPUTS,), (*_padded(some), *arguments))

    def _launch(
        self, kernel: Any, dtype: np.dtype[Any], count: int, arguments: tuple[Any, ...]
    ) -> None:
        if count:
            per_block = _THREADS * max(1, 16 // dtype.itemsize)
            kernel((min(-(-count // per_block), _MOST_BLOCKS),), (_THREADS,), arguments)

    def _get(self, dtype: np.dtype[Any], name: str) -> Any:
        if not knows(dtype):
            raise TypeError(f"no kernel exists for dtype {dtype.name}")
        return self._module(dtype.name, PRELUDE + source_of(dtype.name)).get_function(name)

    def _module(self, key: str, source: str) -> Any:
        with self._lock:
            if key not in self._modules:
                self._modules[key] = self._cupy.RawModule(code=source, options=OPTIONS)
            return self._modules[key]


def _padded(addresses: Sequence[int]) -> list[np.uint64]:
    return [np.uint64(a) for a in [*addresses, *([0] * (MAX_INPUTS - len(addresses)))]]
