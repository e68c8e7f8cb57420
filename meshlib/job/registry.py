"""``GroupRegistry``: the groups that one rank has made, by their ids."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache

from meshlib.calls.context import RankContext
from meshlib.calls.members import Members
from meshlib.groups.backend import parse_backend
from meshlib.groups.process_group import ProcessGroup
from meshlib.job.membership import JobMembership
from meshlib.plain_text import first_of
from transport.checks import to_whole_numbers
from transport.deadline import Timeout, to_seconds
from transport.operands.compression import Compression


class GroupRegistry:
    """Makes groups, gives them ids that all members agree on without a message, and keeps them.

    ``membership`` has the ranks of the job; ``backends`` and ``timeout`` (seconds) are what groups
    get that ask for no others. ``on_made(group)`` is told of each before it is returned.
    """

    def __init__(
        self,
        context: RankContext,
        membership: JobMembership,
        backends: Mapping[str, str],
        timeout: float,
        on_made: Callable[[ProcessGroup], None],
    ) -> None:
        self._context = context
        self._membership = membership
        self._backends = backends
        self._timeout = timeout
        self._on_made = on_made
        self._lock = threading.Lock()
        self._groups: dict[str, ProcessGroup] = {}
        self._interning = threading.Lock()
        self._interned: dict[str, tuple[int, ProcessGroup]] = {}  # how many before it, and the last
        self._made: dict[tuple[int, ...], int] = {}
        self._names: dict[str, int] = {}
        self._epoch = ""

    def group_for(
        self,
        ranks: Sequence[int],
        *,
        backend: str | None = None,
        timeout: Timeout | None = None,
        desc: str = "",
        compression: Compression | None = None,
    ) -> ProcessGroup:
        """Return the one group of ``ranks`` (in this order) with these options.

        One that has retired is followed by another, with an id of its own: when this rank's
        program was told that it broke, or destroyed it. So are the members' programs, each in its
        time, and none makes a call on the next one before; they agree without a message.

        Costs no message: members find each other at the first call. Raises ValueError for ranks
        that are no ranks, appear twice, or do not include this one.
        """
        members = self.check_ranks(ranks)
        if self._context.rank not in members:
            raise ValueError(
                f"rank {self._context.rank} is not among the ranks [{first_of(members)}]"
            )
        chosen = self._backends if backend is None else parse_backend(backend)
        seconds = self._timeout if timeout is None else to_seconds(timeout)
        options = f"{sorted(chosen.items())} {seconds}" + (f" {compression}" if compression else "")
        key = _group_id("mesh", members, options)
        with self._interning:
            count, last = self._interned.get(key, (0, None))
            if last is not None and not last.retired:
                return last
            if last is not None:
                for old in (last, *last.companions()):
                    old.release()
                count += 1
            told = f"{options}{self._epoch}" + (f" after {count}" if count else "")
            group_id = _group_id("mesh", members, told)
            group = self._group(group_id, members, chosen, seconds, desc, compression=compression)
            self._interned[key] = count, group
        return group

    def make_companion(self, base: ProcessGroup, purpose: str, desc: str) -> ProcessGroup:
        """Make what ``base.companion(purpose, desc)`` returns."""
        group_id = _group_id(purpose, base.ranks, base.id)
        return self._group(
            group_id, base.ranks, base.backends, base.seconds, desc, base, base.compression
        )

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        *,
        backend: str | None = None,
        timeout: Timeout | None = None,
        desc: str = "",
        sort: bool = True,
        compression: Compression | None = None,
    ) -> ProcessGroup:
        """Return a new group of ``ranks`` (all by default), distinct from all others.

        Members make their groups of the same ranks in the same order; nothing else is required,
        and a rank outside need not call (if it does, it gets a group that it is no member of).
        """
        members = self.check_ranks(self._membership.epoch.members if ranks is None else ranks)
        if sort:
            members = tuple(sorted(members))
        chosen = self._backends if backend is None else parse_backend(backend)
        seconds = self._timeout if timeout is None else to_seconds(timeout)
        with self._lock:
            count = self._made[members] = self._made.get(members, 0) + 1
        told = f"{count}{self._epoch}" + (f" {compression}" if compression else "")
        group_id = _group_id("new", members, told)
        return self._group(group_id, members, chosen, seconds, desc, compression=compression)

    def agreed_group(
        self, name: str, members: Sequence[int], like: ProcessGroup, desc: str
    ) -> ProcessGroup:
        """Return a new group of ``members``, which they have settled in the agreement ``name``.

        Its backends and deadline are those of the group ``like``.
        """
        ranks = tuple(members)
        group_id = _group_id("agreed", ranks, name)
        return self._group(
            group_id, ranks, like.backends, like.seconds, desc, compression=like.compression
        )

    def next_name(self, stem: str) -> str:
        """Return ``stem`` with a number that rises with each call: equal on all that call alike."""
        with self._lock:
            count = self._names[stem] = self._names.get(stem, 0) + 1
        return f"{stem}/{count}{self._epoch}"

    def begin_epoch(self, number: int, kept: Collection[str]) -> list[ProcessGroup]:
        """Begin an epoch: groups have ids of their own in it, but for those ``kept`` (their ids).

        Drops the others, and returns them, to be closed: the next group of the same ranks is
        another one.
        """
        with self._interning:
            self._epoch = f" epoch {number}"
            known = self._interned.items()
            self._interned = {key: found for key, found in known if found[1].id in kept}
            with self._lock:
                ended = [group for group in self._groups.values() if group.id not in kept]
                self._groups = {key: one for key, one in self._groups.items() if key in kept}
                self._made.clear()
                self._names.clear()
        return ended

    def quiet(self) -> dict[str, tuple[int, int, int]]:
        """Return, of the groups that are whole and have no call under way, by id, the number of the
        last collective, the hash of all, and the number of members.

        Where all members say the same of a group, they can go on with it.
        """
        return {
            group.id: (*group.chain(), len(group.ranks))
            for group in self.all()
            if group.rank() >= 0 and group.state.usable and group.door.lanes.is_idle()
        }

    def check_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return ``ranks`` as a tuple; raise ValueError for duplicates and ranks out of range.

        Raises TypeError for what is no list of whole numbers.
        """
        if ranks is self._membership.epoch.members:
            return tuple(ranks)
        members = tuple(to_whole_numbers(ranks, "ranks"))
        known = self._membership.known
        if members and not 0 <= min(members) <= max(members) < known:
            strange = [rank for rank in members if not 0 <= rank < known]
            raise ValueError(f"ranks has {strange}; expected ranks from 0 to {known - 1}")
        if len(set(members)) != len(members):
            twice = sorted({rank for rank in members if members.count(rank) > 1})
            raise ValueError(f"ranks has {twice} more than once: [{first_of(members)}]")
        if not members:
            raise ValueError("ranks is empty; expected at least one rank")
        return members

    def all(self) -> list[ProcessGroup]:
        """Return the groups that this rank has made, the default group first."""
        with self._lock:
            return list(self._groups.values())

    def forget(self, group: ProcessGroup) -> None:
        """Close ``group`` and drop it; the same ranks get a fresh one when next asked for."""
        for one in (*group.companions(), group):
            with self._lock:
                self._groups.pop(one.id, None)
            one.close()

    def get(self, group_id: str) -> ProcessGroup | None:
        """Return the group with that id, None if this rank has made none."""
        with self._lock:
            return self._groups.get(group_id)

    def standings(self) -> list[tuple[Members, int]]:
        """Return the members of each group, and the number of its last collective."""
        return [(group.members, group.reached()) for group in self.all()]

    def clear(self) -> None:
        """Drop all groups, which are closed."""
        with self._lock:
            self._groups.clear()

    def end_in_a_fork(self) -> None:
        """Be usable in a fork of this rank's process."""
        # Threads that are not here may have held them.
        self._lock, self._interning = threading.Lock(), threading.Lock()

    def _group(
        self,
        group_id: str,
        members: tuple[int, ...],
        chosen: Mapping[str, str],
        seconds: float,
        desc: str,
        beside: ProcessGroup | None = None,
        compression: Compression | None = None,
    ) -> ProcessGroup:
        rank = self._context.rank
        who = Members(group_id, members, rank, dict(chosen), seconds, desc, compression)
        group = ProcessGroup(self._context, who, beside, self.make_companion)
        with self._lock:
            self._groups[group_id] = group
        self._on_made(group)
        return group


@lru_cache(maxsize=64)  # a thousand ranks that are threads ask for the same
def _group_id(kind: str, members: tuple[int, ...], rest: str) -> str:
    digest = hashlib.sha256(f"{members} {rest}".encode()).hexdigest()[:16]
    return f"{kind}-{digest}"
