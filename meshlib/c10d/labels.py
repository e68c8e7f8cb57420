"""``record_comm``: names for calls, as profilers and flight records show them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from meshlib.job.current import current_world


def record_comm(name: str) -> AbstractContextManager[None]:
    """Call the calls that this thread issues in the block ``name``.

    In profiles the name stands in place of ``meshlib.all_reduce`` and its like, in flight records
    beside it. Raises TypeError for a ``name`` that is no ``str``, ValueError without a job.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"name must be a str, got {name!r}")
    return current_world().recorder.named(name)
