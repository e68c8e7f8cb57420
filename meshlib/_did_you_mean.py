"""Suggestions of the intended word, for the end of an error message."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``; did you mean 'x'?`` for the nearest of ``known``, or an empty string."""
    import difflib  # only for errors

    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), by_folded, 1, cutoff)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""
