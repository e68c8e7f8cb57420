"""The assignment of gradients to buckets, and the bucket sizes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from numbers import Real
from typing import Any

MIB = 1 << 20
FIRST_BUCKET_BYTES = MIB
"""The size of the first bucket: small, to start communication early in the backward pass."""


def cap_in_bytes(bucket_cap_mb: Any) -> int:
    """Convert a bucket size from MiB to bytes.

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

    Parameters fill one open bucket for each key (dtype and device), in the given ``order`` of their
    numbers, in which gradients are expected. A key's first bucket is closed once it holds at least
    ``first_bytes``, the others once they hold ``cap_bytes``. A parameter is never split. The
    returned buckets are in the order of their last gradients, in which they can be reduced.
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
