"""Python functions called from compiled JAX programs, in the program's order, on its buffers.

The collectives of ``meshlib.jit`` and ``parallel.jax`` are built on it. Needs JAX.
"""

from meshlib.jit._xla.host_calls import host_call, is_compiling, is_tracing, untransformed
from meshlib.jit._xla.program import HostArray, HostFunction, Program

__all__ = [
    "HostArray",
    "HostFunction",
    "Program",
    "host_call",
    "is_compiling",
    "is_tracing",
    "untransformed",
]
