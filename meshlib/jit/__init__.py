"""Collectives inside ``jax.jit``, on plain arrays: ``import meshlib.jit``. Needs JAX.

See ``meshlib.jit.functions`` for what holds for all, and ``README.md`` beside it for how calls are
kept in order.
"""

from meshlib.jit.functions import (
    Passing,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    permute,
    permute_done,
    permute_start,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from meshlib.jit.host_calls import (
    host_call,
    is_compiling,
    is_tracing,
    untransformed,
)
from meshlib.jit.program import HostArray, HostFunction, Program

__all__ = [
    "HostArray",
    "HostFunction",
    "Passing",
    "Program",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "host_call",
    "is_compiling",
    "is_tracing",
    "permute",
    "permute_done",
    "permute_start",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "untransformed",
]
