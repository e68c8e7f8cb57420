"""``Companions``: the groups beside a group, and when the next mesh of its ranks gets another."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

from meshlib.groups.host import Host
from meshlib.groups.members import Members

if TYPE_CHECKING:
    from meshlib.groups.process_group import ProcessGroup


class Companions(Members):
    """The part of a ``ProcessGroup`` that knows the groups of the same ranks beside it."""

    def __init__(
        self,
        world: Host,
        group_id: str,
        ranks: tuple[int, ...],
        backends: dict[str, str],
        timeout: float,
        desc: str,
    ) -> None:
        super().__init__(group_id, ranks, world.rank, backends, timeout, desc)
        self.world = world
        self.beside: ProcessGroup | None = None
        """The group that this one is a companion of."""
        self.owner: threading.Thread | None = None
        """The thread whose calls these are, where only one can make them (inside ``jax.jit``)."""
        self.retired = False
        """Whether it was destroyed, or this rank's program was told that it broke, or a companion.

        Then the next mesh of these ranks gets another group. Told, not merely broken: that is at
        the same place of the program on every member, whenever each came to know of it.
        """
        self._destroyed = False
        self._adding = threading.Lock()
        self._companions: dict[str, ProcessGroup] = {}

    @property
    def destroyed(self) -> bool:
        """Whether the group was closed, by ``destroy_process_group`` or with the World."""
        return self._destroyed

    def companion(self, purpose: str, desc: str = "") -> ProcessGroup:
        """Return the group of the same ranks for calls of ``purpose``, counted apart.

        For callers whose calls come in an order of their own, such as those inside ``jax.jit``. It
        is this group's alone, with its backends and deadline, closed and aborted with it; its
        failures are its own. Costs no message. ``desc`` is how messages call it. Raises ValueError
        after the group was destroyed.
        """
        with self._adding:
            if self._destroyed:
                raise ValueError(f"{self} was destroyed; make a new one")
            found = self._companions.get(purpose)
            if found is None:
                found = self.world.make_companion(cast("ProcessGroup", self), purpose, desc)
                self._companions[purpose] = found
        found.seconds = self.seconds
        return found

    def companions(self) -> list[ProcessGroup]:
        """Return the companions that were made, and theirs."""
        own = list(self._companions.values())
        return own + [other for one in own for other in one.companions()]

    def retire(self) -> None:
        """Have the next mesh of these ranks get another group; so for what this is beside."""
        self.retired = True
        if self.beside is not None:
            self.beside.retire()
