"""``Companions``: the groups beside a group, and when the next mesh of its ranks gets another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshlib.calls.state import Fate

if TYPE_CHECKING:
    from meshlib.groups.process_group import ProcessGroup


class Companions:
    """The groups of the same ranks beside the group of ``fate``, which is a companion of ``base``.

    ``make(purpose, desc)`` makes one.
    """

    def __init__(
        self,
        fate: Fate,
        base: Companions | None,
        make: Callable[[str, str], ProcessGroup],
    ) -> None:
        self.retired: bool = False
        """Whether the group was destroyed, or this rank's program was told that it broke, or a
        companion.

        Then the next mesh of these ranks gets another group. Told, not merely broken: that is at
        the same place of the program on every member, whenever each came to know of it.
        """
        self._fate = fate
        self._base = base
        self._make = make
        self._adding = threading.Lock()
        self._made: dict[str, ProcessGroup] = {}

    def get(self, purpose: str, desc: str) -> ProcessGroup:
        """Return the companion for calls of ``purpose``, making it if there is none yet."""
        with self._adding:
            if self._fate.destroyed:
                raise ValueError(f"{self._fate.members} was destroyed; make a new one")
            found = self._made.get(purpose)
            if found is None:
                found = self._made[purpose] = self._make(purpose, desc)
        found.set_timeout(self._fate.members.seconds)
        return found

    def all(self) -> list[ProcessGroup]:
        """Return those that were made, and theirs."""
        own = list(self._made.values())
        return own + [other for one in own for other in one.companions()]

    def retire(self) -> None:
        """Have the next mesh of these ranks get another group; so for what this is beside."""
        self.retired = True
        if self._base is not None:
            self._base.retire()

    def end_in_a_fork(self) -> None:
        """Be usable in a fork of this rank's process."""
        self._adding = threading.Lock()  # threads that are not here may have held it
