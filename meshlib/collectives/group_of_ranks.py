"""What the collective mixins build on: something that has, or is, a process group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from meshlib.calls.shortcut import Shortcut
from meshlib.diagnosis.recorder import COLLECTIVE
from transport.call import NO_ROOT, Call, Kind
from transport.checks import to_whole_number
from transport.communicator import Communicator


class Door(Protocol):
    """The side of a ProcessGroup that a collective needs."""

    ranks: tuple[int, ...]
    seconds: float
    shortcut: Shortcut | None

    def rank(self) -> int:
        """Return this rank's place in the group, -1 if it is no member."""
        ...

    def group_rank(self, global_rank: int) -> int:
        """Return the place of a global rank."""
        ...

    def issue(
        self,
        kind: Kind,
        run: Callable[[Communicator, Call], Any],
        device: str = "cpu",
        elements: int = 0,
        dtype: int = 0,
        op: int = 0,
        root: int = NO_ROOT,
        extra: int = 0,
        nbytes: int = 0,
        peer: int = COLLECTIVE,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
    ) -> Any:
        """Make one call; see ``ProcessGroup.issue``."""
        ...


class GroupOfRanks:
    """Something that has, or is, a process group."""

    # No ABC: those take half a microsecond for ``isinstance``, which each call asks once.
    @property
    def process_group(self) -> Door:
        """The group that the calls of this object are made on."""
        raise NotImplementedError

    def call_timeout(self, timeout: float | timedelta | None) -> float | timedelta | None:
        """Return the deadline of a call that was given ``timeout``; None: the group's own."""
        return timeout

    def resolve_rank(
        self, rank: int | None, group_rank: int | None, name: str, default: int | None = None
    ) -> int:
        """Return the group rank that ``rank`` (global) or ``group_rank`` means.

        Exactly one is given, unless there is a ``default``. Raises ValueError otherwise, and for
        a rank that is not in the group, TypeError for what is no whole number; ``name`` is the
        argument's (``src``: then also ``group_src``).
        """
        group = self.process_group
        if rank is None and group_rank is None and default is not None:
            return default
        if (rank is None) == (group_rank is None):
            got = f"{name}={rank}, group_{name}={group_rank}"
            raise ValueError(f"exactly one of {name} and group_{name} is expected, got {got}")
        if rank is not None:
            try:
                return group.group_rank(to_whole_number(rank, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        place = to_whole_number(group_rank, f"group_{name}")
        if not 0 <= place < len(group.ranks):
            raise ValueError(
                f"group_{name} is {place}; expected 0 to {len(group.ranks) - 1} in {group}"
            )
        return place
