"""Sizes in text form: ``8``, ``64K``, ``1M``."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PATTERN = re.compile(r"(\d+)\s*([KMG]?)(i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return ``text`` in bytes (units are powers of 1024); raise ValueError for anything else."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"size must be like 8, 64K, 1M or 1G, got {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]


def format_size(nbytes: int) -> str:
    """Return ``nbytes`` with the largest unit that divides it: ``64 KiB``."""
    for unit in ("G", "M", "K"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]} {unit}iB"
    return f"{nbytes} B"
