"""The ranks that save or load together; an error on one is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from meshlib._groups.agreement import gather_or_raise
from meshlib._groups.process_group import ProcessGroup
from meshlib._job.current import Group, find_world
from meshlib.checkpoint._errors import CheckpointError

T = TypeVar("T")


class Participants:
    """The members of a group, or this process alone if there is no job.

    ``group`` is a mesh or a process group; None is the default group. Raises TypeError for
    anything else, ValueError on a rank outside of the group.
    """

    def __init__(self, group: Group) -> None:
        world = find_world()
        found = getattr(group, "process_group", None)
        if group is None and world is not None:
            found = world.default_group
        if (found is not None and not isinstance(found, ProcessGroup)) or (group and not found):
            raise TypeError(f"group is {group!r}; expected a DeviceMesh or a ProcessGroup")
        if found is not None and found.rank() < 0:
            raise ValueError(f"group: this rank is not a member of {found}")
        self.group = found
        self.ranks: tuple[int, ...] = (0,) if found is None else found.ranks
        self.place: int = 0 if found is None else found.rank()
        self.rank: int = self.ranks[self.place]

    def with_own_group(self) -> Participants:
        """Return the same ranks with a new group, whose calls do not mix with the old one's."""
        world = find_world()
        if self.group is None or world is None:
            return self
        own = world.registry.new_group(
            self.ranks, timeout=self.group.timeout, desc="checkpoint", sort=False
        )
        return Participants(own)

    def release(self) -> None:
        """Close the group that ``with_own_group`` made."""
        world = find_world()
        if self.group is not None and world is not None:
            world.registry.forget(self.group)

    @property
    def is_first(self) -> bool:
        """True on the rank that claims, publishes and removes checkpoints."""
        return self.place == 0

    def gather(self, make: Callable[[], T]) -> list[T]:
        """Return the values of ``make()`` on all ranks. If it raises on one, all ranks raise."""
        return gather_or_raise(self.group, make, CheckpointError)

    def of_first(self, make: Callable[[], T]) -> T:
        """Return the value of ``make()`` on the first rank; the other ranks do not call it."""
        return self.gather(lambda: make() if self.is_first else None)[0]  # type: ignore[return-value]


def first_difference(ranks: Sequence[int], answers: Sequence[dict[str, str]]) -> str | None:
    """Return the first difference of a rank's lines from the first rank's; None if all agree."""
    mine = answers[0]
    for rank, other in zip(ranks, answers, strict=True):
        if other == mine:
            continue
        for path in mine | other:
            if mine.get(path) != other.get(path):
                texts = [lines.get(path, "nothing") for lines in (mine, other)]
                return f"state{path} is {texts[0]} on rank {ranks[0]} and {texts[1]} on rank {rank}"
        return f"the state has another order on rank {rank} than on rank {ranks[0]}"
    return None
