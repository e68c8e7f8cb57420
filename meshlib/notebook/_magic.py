"""``%%ranks``: a cell that runs on the ranks."""

from __future__ import annotations

from typing import Any

from meshlib.notebook._ranks import Ranks, RankSet


def load_ipython_extension(shell: Any) -> None:
    """Register ``%%ranks``; ``%load_ext meshlib.notebook`` calls this with IPython's shell."""

    def ranks(line: str, cell: str) -> None:
        """Run this cell on ranks: ``%%ranks [NAME] [DIM=NUMBER,...]``.

        NAME is the variable that holds the ranks. It may be omitted if only one does.
        """
        find_ranks(shell.user_ns, line).execute(cell)

    shell.register_magic_function(ranks, "cell", "ranks")


def find_ranks(variables: dict[str, Any], line: str) -> RankSet:
    """Return the ranks of ``variables`` that ``line`` selects, by a name, coordinates, or both.

    Raises ValueError if the line selects none, or several variables.
    """
    words = line.split()
    coordinates = words.pop() if words and "=" in words[-1] else None
    name = words.pop() if words else None
    if words:
        raise ValueError(f"%%ranks {line}: expected %%ranks [NAME] [DIM=NUMBER,...]")
    if name is not None:
        found = variables.get(name)
        if not isinstance(found, RankSet):
            raise ValueError(f"%%ranks {line}: {name} holds no ranks; expected local_ranks(...)")
    else:
        found = _only(variables)
    return found if coordinates is None else found[coordinates]


def _only(variables: dict[str, Any]) -> Ranks:
    names = {
        id(value): (name, value)
        for name, value in variables.items()
        if isinstance(value, Ranks) and not value.is_closed
    }
    if len(names) != 1:
        held = ", ".join(name for name, _ in names.values()) or "none"
        raise ValueError(
            f"%%ranks needs ranks in exactly one variable, and found {held}; expected"
            " ranks = dist.local_ranks(4), or %%ranks NAME"
        )
    return next(value for _, value in names.values())
