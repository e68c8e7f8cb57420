"""How every public thing of this package is told over which ranks it works."""

from __future__ import annotations

from typing import Protocol

import meshlib
from meshlib import ProcessGroup


class Ranks(Protocol):
    """A set of ranks that can be communicated over: a ``DeviceMesh`` or a ``ProcessGroup``."""

    @property
    def process_group(self) -> ProcessGroup:
        """The group over all the ranks."""
        ...


def resolve(ranks: Ranks | None, argument: str) -> ProcessGroup:
    """Return the group of ``ranks``, or the default group when None.

    Raises, naming ``argument``, ValueError when this rank is not a member, and TypeError for what
    is no set of ranks.
    """
    group = meshlib.group.WORLD if ranks is None else getattr(ranks, "process_group", None)
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"{argument} must be a DeviceMesh or a ProcessGroup, such as mesh['dp'], got {ranks!r}"
        )
    if group.rank() < 0:
        raise ValueError(f"{argument}: this rank is not a member of {group}")
    return group
