"""Agreement on errors: an error on one rank is raised on all ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from meshlib._groups.process_group import ProcessGroup

T = TypeVar("T")


def gather_or_raise(
    group: ProcessGroup | None, make: Callable[[], T], own: type[Exception] = ValueError
) -> list[T]:
    """Return the results of ``make()`` on all ranks of ``group``, or only here for None.

    If ``make`` raises on a rank, all ranks raise. The other ranks' errors begin with that rank's
    number; their type is that of the error if it is a common one, else ``own``. An ``own`` type
    must accept a single message.
    """
    error, mine = None, None
    try:
        mine = ("", None, make())
    except Exception as caught:  # noqa: BLE001 (raised below, on all ranks)
        error = caught
        mine = (str(caught), _kind_to_raise(caught, own), None)
    outcomes: list[Any] = [mine]
    if group is not None:
        outcomes *= group.size()
        group.all_gather_object(outcomes, mine)
    if error is not None:
        raise error
    for place, (message, kind, _) in enumerate(outcomes):
        if kind is not None:
            rank = group.ranks[place] if group is not None else 0
            raise kind(f"rank {rank}: {message}")
    return [value for _, _, value in outcomes]


def _kind_to_raise(error: Exception, own: type[Exception]) -> type[Exception]:
    """Return the exception type that the other ranks raise; it must accept a single message."""
    if isinstance(error, own):
        return type(error)
    kinds = (ValueError, TypeError, ImportError, FileNotFoundError, OSError)
    return next((kind for kind in kinds if isinstance(error, kind)), own)
