"""Collectives inside ``jax.jit``, on plain arrays: ``import meshlib.jit``. Needs JAX.

``meshlib.jit._functions`` describes the rules common to all functions, and ``README.md`` in the
same folder explains how calls are kept in order. ``meshlib.extend.jit`` has the building blocks.
"""

from meshlib.jit._functions import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scan,
    scatter,
)
from meshlib.jit._messages import recv, recv_anysource, send, sendrecv
from meshlib.jit._permuting import (
    PendingPermute,
    exchange_halo,
    permute,
    permute_done,
    permute_start,
)
from meshlib.jit._starting import jit

__all__ = [
    "PendingPermute",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "exchange_halo",
    "gather",
    "jit",
    "permute",
    "permute_done",
    "permute_start",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "send",
    "sendrecv",
]
