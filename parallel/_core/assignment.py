"""The assignment of gradients to buckets, and the buckets' size."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from numbers import Real
from typing import Any

MIB = 1 << 20
FIRST_BUCKET_BYTES = MIB
"""The first bucket is small, so that communication begins early in the backward pass."""


def cap_in_bytes(bucket_cap_mb: Any) -> int:
    """Return a bucket size given in MiB in bytes.

    Raises TypeError for a value that is not a number, ValueError for one that is not positive and
    finite.
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
    """Group parameters into buckets, as c10d does.

    Parameters (``order``: their numbers, as gradients are expected) fill one open bucket for each
    key (dtype and device). A key's first bucket is closed once it holds at least ``first_bytes``,
    the others once they hold ``cap_bytes``. A parameter is never split. Buckets are returned in the
    order in which their last gradients come, which is the order in which they can be sent off.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    limits: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    for number in order:
        key = keys[number]
        open_buckets.setdefault(key, []).append(number)
        filled[key] = filled.get(key, 0) + nbytes[number]
        if filled[key] >= limits.get(key, first_bytes):
            closed.append(open_buckets.pop(key))
            filled[key] = 0
            limits[key] = cap_bytes
    place = {number: i for i, number in enumerate(order)}
    return sorted([*closed, *open_buckets.values()], key=lambda bucket: place[bucket[-1]])
