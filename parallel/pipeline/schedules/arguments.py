"""Checks that the schedules share."""

from __future__ import annotations

from parallel.checks import to_count


def check_counts(**counts: int) -> None:
    """Raise ValueError for the first of ``counts`` below 1, TypeError for no whole number."""
    for name, value in counts.items():
        to_count(value, name)


def rounds_of(microbatches: int, ranks: int, name: str) -> list[range]:
    """Return the rounds in which microbatches go through a rank's stages: of ``ranks`` each.

    If there are fewer, all are one round. Raises ValueError when they do not divide.
    """
    count = max(1, microbatches // ranks)
    if microbatches % count:
        raise ValueError(
            f"microbatches is {microbatches}, which does not divide into the {count} rounds of "
            f"{name} on {ranks} ranks; expected at most {ranks}, or a multiple of it"
        )
    width = microbatches // count
    return [range(i * width, (i + 1) * width) for i in range(count)]
