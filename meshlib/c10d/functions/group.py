"""What the argument ``group`` of c10d's functions may be."""

from __future__ import annotations

from meshlib.collectives.collectives import Collectives
from meshlib.job.world import current_world

Group = Collectives | None
"""A ProcessGroup, a DeviceMesh, or None for the default group."""


def resolve_group(group: Group) -> Collectives:
    """Return ``group``, or the default group for None. Raises TypeError for anything else."""
    if group is None:
        return current_world().default_group
    if not isinstance(group, Collectives):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}"
        )
    return group
