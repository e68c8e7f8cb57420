"""Collectives inside ``jax.jit``, on plain arrays: ``import meshlib.jit``. Needs JAX.

See ``meshlib.jit._functions`` for what holds for all, and ``README.md`` beside it for how calls are
kept in order. ``meshlib.extend.jit`` has what they are made of.
"""

from meshlib.jit._functions import (
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
    sendrecv,
)
from meshlib.jit._starting import jit

__all__ = [
    "Passing",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "jit",
    "permute",
    "permute_done",
    "permute_start",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "sendrecv",
]
