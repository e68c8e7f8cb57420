"""The assignment of gradients to buckets, and the buckets' size."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from numbers import Real
from typing import Any

MIB = 1 << 20
FIRST_BUCKET_BYTES = MIB
"""The first bucket is small, so that communication begins early in the backward pass."""

_FEW = 16
"""A bucket's last parameters, up to 1/16 of its size together, may move on to the next bucket."""


def cap_in_bytes(bucket_cap_mb: Any) -> int:
    """Return a bucket size given in MiB in bytes.

    Raises TypeError for what is no number, ValueError for one that is not positive and finite.
    """
    if not isinstance(bucket_cap_mb, Real):
        raise TypeError(
            "bucket_cap_mb must be a number (the size of buckets in MiB), got "
            f"{bucket_cap_mb!r} of type {type(bucket_cap_mb).__name__}"
        )
    size = float(bucket_cap_mb)
    if not (size > 0 and math.isfinite(size)):
        raise ValueError(f"bucket_cap_mb must be positive and finite, got {bucket_cap_mb}")
    return int(size * MIB)


def assign_buckets(
    order: Sequence[int],
    nbytes: Sequence[int],
    keys: Sequence[Hashable],
    first_bytes: int,
    cap_bytes: int,
) -> list[list[int]]:
    """Group parameters into buckets.

    Parameters (``order``: their numbers, as gradients are expected) fill one open bucket for each
    key (dtype and device). A key's first bucket is closed once it holds at least ``first_bytes``.
    The others are closed once they hold ``cap_bytes``, as c10d does it, or before a parameter that
    would take them beyond that. Otherwise a complete gradient would wait for a large late one. A
    few small ones that come just before that parameter (a layer's bias) go with it: their bucket
    would wait for their layer. A parameter is never split, and one larger than the cap has a bucket
    of its own, but for such small ones. Buckets are returned in the order in which their last
    gradients come, which is the order in which they can be sent off.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    limits: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    few = min(first_bytes, cap_bytes // _FEW)
    for number in order:
        key = keys[number]
        bucket = open_buckets.setdefault(key, [])
        if key in limits and filled[key] + nbytes[number] > cap_bytes:
            small = _count_small([nbytes[each] for each in bucket], few)
            if small < len(bucket):
                begin = len(bucket) - small
                closed.append(bucket[:begin])
                bucket = open_buckets[key] = bucket[begin:]
                filled[key] = sum(nbytes[each] for each in bucket)
        bucket.append(number)
        filled[key] = filled.get(key, 0) + nbytes[number]
        if filled[key] >= limits.get(key, first_bytes):
            closed.append(open_buckets.pop(key))
            filled[key] = 0
            limits[key] = cap_bytes
    place = {number: i for i, number in enumerate(order)}
    return sorted([*closed, *open_buckets.values()], key=lambda bucket: place[bucket[-1]])


def _count_small(sizes: Sequence[int], most: int) -> int:
    """Return how many of the last of ``sizes`` are at most ``most`` together."""
    count, total = 0, 0
    for size in reversed(sizes):
        total += size
        if total > most:
            break
        count += 1
    return count
