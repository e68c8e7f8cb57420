"""All ranks of a pipeline have the same one in mind, or all raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from meshlib import ProcessGroup
from parallel.ddp.replicas import first_difference


def agree(group: ProcessGroup, mistake: str | None, lines: Sequence[str]) -> None:
    """Raise ValueError on all ranks if one has made a mistake, or its ``lines`` differ.

    A collective. ``mistake`` is what is wrong on this rank, None if nothing is.
    """
    gathered: list[Any] = [None] * group.size()
    group.all_gather_object(gathered, (mistake, list(lines)))
    reports = cast(list[tuple[str | None, list[str]]], gathered)
    wrong = [(rank, text) for rank, (text, _) in enumerate(reports) if text]
    if not wrong:
        compared = ((r, first_difference(own, reports[0][1])) for r, (_, own) in enumerate(reports))
        wrong = [(rank, text) for rank, text in compared if text]
    if wrong:
        rows = "".join(f"\n  rank {rank}: {text}" for rank, text in wrong)
        raise ValueError(f"the pipeline on {group} does not fit:{rows}")
