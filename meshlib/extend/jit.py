"""Python called from compiled JAX programs, in the order of the program, on its own buffers.

The collectives of ``meshlib.jit`` and ``parallel.jax`` are made of it. Needs JAX.
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
