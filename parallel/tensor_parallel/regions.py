"""Crossing between replicated and sharded activations.

These are the conjugate operators f and g of Shoeybi et al., "Megatron-LM", arXiv:1909.08053,
section 3: f is the identity forward and an all-reduce backward, g the reverse. Here each is one
function, and a layer calls it where it needs it. Sharded activations are split along their last
dimension, by group rank. ``reduce`` takes its array over and works in place.
"""

from __future__ import annotations

from typing import Any

from meshlib import ProcessGroup, Work
from parallel.arrays import Array, namespace


def reduce(x: Array, group: ProcessGroup) -> Array:
    """Sum ``x`` over the group, in place (it must be contiguous): every rank gets the same bits."""
    return x if group.size() == 1 else group.all_reduce(x)


def start_reduce(x: Array, group: ProcessGroup) -> Work[Any] | None:
    """Begin ``reduce`` and let the caller compute meanwhile; ``x`` is the sum after ``wait``."""
    return None if group.size() == 1 else group.all_reduce(x, async_op=True)


def gather(x: Array, group: ProcessGroup) -> Array:
    """Return the ranks' ``x``, (..., n), side by side: (..., n * size), the same on every rank."""
    if group.size() == 1:
        return x
    xp = namespace(x)
    parts = xp.empty((group.size(), *x.shape), dtype=x.dtype)
    group.all_gather_into_tensor(parts, xp.ascontiguousarray(x))
    return xp.concatenate(list(parts), axis=-1)


def split(x: Array, group: ProcessGroup) -> Array:
    """Return this rank's part of ``x``, (..., n): a contiguous (..., n / size)."""
    if group.size() == 1:
        return x
    width = part_size(x.shape[-1], group, "the input's last dimension")
    begin = group.rank() * width
    return namespace(x).ascontiguousarray(x[..., begin : begin + width])


def part_size(total: int, group: ProcessGroup, what: str) -> int:
    """Return ``total / size``; raise ValueError with both numbers when it is not whole."""
    width, rest = divmod(total, group.size())
    if rest:
        raise ValueError(
            f"{what} is {total}, which does not divide by the {group.size()} ranks of {group}"
        )
    return width
