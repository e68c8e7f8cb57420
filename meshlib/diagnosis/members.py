"""``Members``: who is in a group of ranks, by what names, over which backends."""

from __future__ import annotations

from transport.deadline import Timeout, to_seconds


class Members:
    """The members ``ranks`` (global ranks; the position is the rank in the group).

    ``global_rank`` is the rank that asks, which need not be one of them. ``backends`` has a name
    for each device; ``timeout`` is in seconds.
    """

    def __init__(
        self,
        group_id: str,
        ranks: tuple[int, ...],
        global_rank: int,
        backends: dict[str, str],
        timeout: float,
        desc: str,
    ) -> None:
        self.id = group_id
        self.ranks = ranks
        self.global_rank = global_rank
        self.backends = backends
        self.group_desc = desc
        self.seconds = timeout
        self._positions = {rank: i for i, rank in enumerate(ranks)}
        self._rank = self._positions.get(global_rank, -1)

    def rank(self) -> int:
        """Return this rank's place in the group, -1 if it is no member."""
        return self._rank

    def size(self) -> int:
        """Return the number of members, -1 on a rank that is none."""
        return len(self.ranks) if self._rank >= 0 else -1

    def name(self) -> str:
        """Return the default backend's name, as c10d does."""
        return next(iter(self.backends.values()))

    @property
    def backend(self) -> str:
        """The backends by device: ``cpu:tcp``, or ``cpu:tcp,cuda:nccl``."""
        return ",".join(f"{device}:{name}" for device, name in self.backends.items())

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the deadline of calls that bring none of their own: seconds or a timedelta.

        Raises ValueError for a negative one, TypeError for what is no number.
        """
        self.seconds: float = to_seconds(timeout)

    def group_rank(self, global_rank: int) -> int:
        """Return the place of ``global_rank`` in the group; raise ValueError for a stranger."""
        place = self._positions.get(global_rank)
        if place is None:
            raise ValueError(f"global rank {global_rank} is not in {self}")
        return place

    def place_of(self, global_rank: int) -> int | None:
        """Return the place of ``global_rank`` in the group, None for a stranger."""
        return self._positions.get(global_rank)

    def __repr__(self) -> str:
        name = self.group_desc or self.id
        shown = ", ".join(map(str, self.ranks[:8])) + (", …" if len(self.ranks) > 8 else "")
        return f"group {name!r} of {len(self.ranks)} ranks [{shown}]"
