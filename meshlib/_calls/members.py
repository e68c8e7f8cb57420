"""``Members``: the ranks of a group, their names and the backends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from meshlib._plain_text import first_of
from transport._operands.compression import Compression
from transport._waiting.deadline import Timeout, to_seconds


class Members:
    """The members ``ranks`` (global ranks; the position is the rank in the group).

    The calling rank, ``global_rank``, need not be a member. ``backends`` maps each device to the
    name of a backend. ``timeout`` is in seconds. Between hosts, large reductions of CPU arrays are
    compressed as ``compression`` (None: uncompressed).
    """

    def __init__(
        self,
        group_id: str,
        ranks: tuple[int, ...],
        global_rank: int,
        backends: dict[str, str],
        timeout: float,
        desc: str,
        compression: Compression | None = None,
    ) -> None:
        self.id = group_id
        self.ranks = ranks
        self.global_rank = global_rank
        self.backends = backends
        self.group_desc = desc
        self.seconds = timeout
        self.compression: Compression | None = compression
        self._places: range | dict[int, int] = even(ranks) or {
            rank: i for i, rank in enumerate(ranks)
        }
        place = self.place_of(global_rank)
        self._rank = -1 if place is None else place

    def rank(self) -> int:
        """Return the caller's rank in the group, or -1 if it is not a member."""
        return self._rank

    def size(self) -> int:
        """Return the number of members, or -1 if the caller is not a member."""
        return len(self.ranks) if self._rank >= 0 else -1

    def name(self) -> str:
        """Return the default backend's name, as c10d does."""
        return next(iter(self.backends.values()))

    @property
    def backend(self) -> str:
        """The backends by device: ``cpu:tcp``, or ``cpu:tcp,cuda:nccl``."""
        return ",".join(f"{device}:{name}" for device, name in self.backends.items())

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default deadline of calls: seconds, a timedelta or "30s".

        Raises ValueError if it is negative, TypeError for other types.
        """
        self.seconds: float = to_seconds(timeout)

    def group_rank(self, global_rank: int) -> int:
        """Return the group rank of ``global_rank``. Raises ValueError if it is not a member."""
        place = self.place_of(global_rank)
        if place is None:
            raise ValueError(f"global rank {global_rank} is not in {self}")
        return place

    def place_of(self, global_rank: int) -> int | None:
        """Return the group rank of ``global_rank``, or None if it is not a member."""
        places = self._places
        if isinstance(places, dict):
            return places.get(global_rank)
        return places.index(global_rank) if global_rank in places else None

    def places_of(self, global_ranks: Iterable[int]) -> Set[int]:
        """Return the group ranks of the members among ``global_ranks``."""
        wanted = frozenset(global_ranks)
        if not wanted:
            return wanted
        members = wanted.intersection(self._places)
        if self._places == range(len(self.ranks)):  # group ranks equal global ranks
            return members
        return {self.group_rank(rank) for rank in members}

    def __repr__(self) -> str:
        name = self.group_desc or self.id
        shown = first_of(self.ranks, 8)
        sent = "" if self.compression is None else f" (reductions as {self.compression})"
        return f"group {name!r} of {len(self.ranks)} ranks [{shown}]{sent}"


def even(ranks: Sequence[int]) -> range | None:
    """Return ``ranks`` as a range if they are evenly spaced, else None.

    Most groups' ranks are. Then a large job need not store or send tables of ranks.
    """
    if len(ranks) > 1 and (step := ranks[1] - ranks[0]):
        found = range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step)
        if len(found) == len(ranks) and all(map(int.__eq__, found, ranks)):
            return found
    return None
