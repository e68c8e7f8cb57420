"""The building blocks of reports and tables: columns, sizes, ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return ``rows`` as lines with aligned columns; those with an index in ``right`` are
    right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def binary_size(nbytes: float) -> str:
    """Return a size such as ``1.5 MiB``; a KiB is 1024 bytes."""
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.4g} {_UNITS[unit]}"


def named(ranks: Sequence[int], most: int | None = None) -> str:
    """Return ``ranks 1, 2``: all ranks, or the first ``most`` and the number of further ones."""
    shown = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if most is not None and len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def first_of(ranks: Sequence[int], most: int = 16) -> str:
    """Return ``0, 1, …``: all of ``ranks``, or the first ``most``."""
    return ", ".join(map(str, ranks[:most])) + (", …" if len(ranks) > most else "")


def have(ranks: Sequence[int]) -> str:
    """Return "have" or "has", to follow ``named(ranks)``."""
    return "have" if len(ranks) > 1 else "has"
