"""``GroupRegistry``: the groups of one rank, by their ids."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from meshlib._calls.call_queue import CallQueue
from meshlib._calls.context import RankContext
from meshlib._calls.members import Members
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._events.events import Departures, Refused
from meshlib._groups.backend import FAKE, is_fake, parse_backend
from meshlib._groups.process_group import ProcessGroup
from meshlib._job.membership import JobMembership
from meshlib._plain_text import first_of
from transport._checks import to_whole_numbers
from transport._errors import DistBackendError, DistError
from transport._operands.compression import Compression
from transport._waiting.deadline import Timeout, to_seconds


class GroupRegistry:
    """Creates and stores groups, with ids on which all members agree without a message.

    ``membership`` has the ranks of the job. ``backends`` and ``timeout`` (seconds) are the defaults
    of groups. Failures and refusals of a group may arrive before this rank creates it; they are
    stored until then.
    """

    def __init__(
        self,
        context: RankContext,
        membership: JobMembership,
        backends: Mapping[str, str],
        timeout: float,
    ) -> None:
        self._context = context
        self._membership = membership
        self._backends = backends
        self._timeout = timeout
        self._lock = threading.Lock()
        self._groups: dict[str, ProcessGroup] = {}
        self._failures: dict[str, DistError] = {}
        self._refusals: dict[str, list[Refused]] = {}
        self._left_behind: DistError | None = None
        self._interning = threading.Lock()
        self._interned: dict[str, tuple[int, ProcessGroup]] = {}  # with the number of earlier ones
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

        A retired group is replaced by a new one with a new id. A group retires when this rank's
        program gets its error or destroys it. Each member's program does so at the same place, so
        the members agree on the next group without a message.

        No message is sent: members connect at the first call. Raises ValueError for ranks that do
        not exist, appear twice, or do not include this one.
        """
        members = self.check_ranks(ranks)
        if self._context.rank not in members:
            raise ValueError(
                f"rank {self._context.rank} is not among the ranks [{first_of(members)}]"
            )
        chosen = self._backends_for(backend)
        seconds = self._timeout if timeout is None else to_seconds(timeout)
        options = f"{sorted(chosen.items())} {seconds}" + (f" {compression}" if compression else "")
        key = _group_id("mesh", members, options)
        with self._interning:
            count, last = self._interned.get(key, (0, None))
            if last is not None:
                queue = call_queue_of(last)
                if not queue.state.retired:
                    return last
                queue.release()
                count += 1
            rest = f"{options}{self._epoch}" + (f" after {count}" if count else "")
            group_id = _group_id("mesh", members, rest)
            group = self._group(group_id, members, chosen, seconds, desc, compression=compression)
            self._interned[key] = count, group
        return group

    def derived_group(self, base: ProcessGroup, purpose: str, desc: str) -> ProcessGroup:
        """See ``meshlib.extend.derived_group``."""
        queue = call_queue_of(base)
        if base.rank() < 0:
            raise ValueError(f"rank {base.global_rank} is not a member of {base}")
        group_id = _group_id(purpose, base.ranks, f"{base.id}{self._epoch}")
        with self._interning:
            if queue.state.destroyed:
                raise ValueError(f"{base} was destroyed; make a new one")
            with self._lock:
                found = self._groups.get(group_id)
            if found is None:
                found = self._group(
                    group_id, base.ranks, base.backends, 0.0, desc, base, base.compression
                )
        found.set_timeout(queue.members.seconds)
        return found

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
        """Return a new group of ``ranks`` (by default all), distinct from all other groups.

        Members create their groups of the same ranks in the same order. A rank outside need not
        call; if it does, it gets a group without itself.
        """
        members = self.check_ranks(self._membership.epoch.members if ranks is None else ranks)
        if sort:
            members = tuple(sorted(members))
        chosen = self._backends_for(backend)
        seconds = self._timeout if timeout is None else to_seconds(timeout)
        with self._lock:
            count = self._made[members] = self._made.get(members, 0) + 1
        rest = f"{count}{self._epoch}" + (f" {compression}" if compression else "")
        group_id = _group_id("new", members, rest)
        return self._group(group_id, members, chosen, seconds, desc, compression=compression)

    def agreed_group(
        self, name: str, members: Sequence[int], like: ProcessGroup, desc: str
    ) -> ProcessGroup:
        """Return a new group of ``members``, the result of the agreement ``name``.

        It has the backends and the deadline of ``like``.
        """
        ranks = tuple(members)
        group_id = _group_id("agreed", ranks, name)
        return self._group(
            group_id,
            ranks,
            like.backends,
            call_queue_of(like).members.seconds,
            desc,
            compression=like.compression,
        )

    def next_name(self, stem: str) -> str:
        """Return ``stem`` with the number of the call, which is equal on all ranks."""
        with self._lock:
            count = self._names[stem] = self._names.get(stem, 0) + 1
        return f"{stem}/{count}{self._epoch}"

    def begin_epoch(self, number: int, kept: Collection[str]) -> list[CallQueue]:
        """Begin an epoch, in which all groups get new ids, except those with an id in ``kept``.

        Removes the other groups and returns their queues; the caller closes them.
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
        return [call_queue_of(group) for group in ended]

    def quiet(self) -> dict[str, tuple[int, int, int]]:
        """Return the state of each usable group without an open call, by id.

        The state is the number of the last collective, the hash of all collectives, and the number
        of members. If all members have the same state of a group, they can continue to use it.
        """
        return {
            queue.members.id: (
                queue.state.order.sequence,
                queue.state.order.history,
                len(queue.ranks),
            )
            for queue in self.queues()
            if queue.rank >= 0 and queue.state.usable and queue.streams.is_idle()
        }

    def check_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return ``ranks`` as a tuple; raise ValueError for duplicates and ranks out of range.

        Raises TypeError unless ``ranks`` is a list of integers.
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
        """Return the groups of this rank, the default group first."""
        with self._lock:
            return list(self._groups.values())

    def queues(self) -> list[CallQueue]:
        """Return the call queues of the groups, the default group's first."""
        return [call_queue_of(group) for group in self.all()]

    def forget(self, group: ProcessGroup) -> None:
        """Close and remove ``group``; the next group of the same ranks is a new one."""
        queue = call_queue_of(group)
        with self._lock:
            for one in queue.with_derived():
                self._groups.pop(one.members.id, None)
        queue.close()

    def get(self, group_id: str) -> CallQueue | None:
        """Return the queue of the group with that id, or None if there is none on this rank."""
        with self._lock:
            group = self._groups.get(group_id)
        return None if group is None else call_queue_of(group)

    def progress(self) -> list[tuple[Members, int]]:
        """Return the members of each group, and the number of its last collective."""
        return [(queue.members, queue.state.order.sequence) for queue in self.queues()]

    def clear(self) -> None:
        """Remove all groups; they must be closed."""
        with self._lock:
            self._groups.clear()

    # ------------------------------------------------------------------ events

    def fail(self, group_id: str, error: DistError) -> None:
        """Break the group with that id, now or when it is created; the first error stays."""
        with self._lock:
            self._failures.setdefault(group_id, error)
        if (queue := self.get(group_id)) is not None:
            queue.failure.fail(error)

    def refuse(self, refusal: Refused) -> None:
        """Report a member's refusal of a call to its group, now or when the group is created."""
        with self._lock:
            self._refusals.setdefault(refusal.group, []).append(refusal)
        if (queue := self.get(refusal.group)) is not None:
            queue.failure.on_refusal(refusal)

    def lose(self, rank: int, error: DistError) -> None:
        """Break the groups of the lost ``rank``, after ``membership`` has recorded it."""
        for queue in self.queues():
            if rank in queue.ranks:
                queue.failure.fail(error)

    def do_without(self, left: Departures) -> None:
        """Report departed ranks to the groups, after ``membership`` has recorded them."""
        for queue in self.queues():
            queue.failure.do_without(left)

    def end_all(self, why: str) -> None:
        """Break all groups of this rank."""
        for queue in self.queues():
            queue.failure.fail(DistBackendError(f"{queue} has ended: {why}"))

    def leave_behind(self, error: DistError) -> None:
        """Make all groups raise ``error``, in a fork of this rank's process."""
        # Threads that the fork lacks may have held the locks.
        self._lock, self._interning = threading.Lock(), threading.Lock()
        self._left_behind = error
        for queue in self.queues():
            queue.state.end_in_a_fork(error)

    def _backends_for(self, backend: str | None) -> Mapping[str, str]:
        """Return the backends of a group; in a job with the fake backend, always that one."""
        chosen = self._backends if backend is None else parse_backend(backend)
        if is_fake(self._backends):
            return self._backends
        if is_fake(chosen):
            raise ValueError(
                f"backend {backend!r} is for a job without other processes; expected"
                f" init_process_group(backend={FAKE!r}), which sets it for all groups"
            )
        return chosen

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
        group = ProcessGroup(self._context, who, beside)
        queue = call_queue_of(group)
        with self._lock:
            self._groups[group_id] = group
        if self._left_behind is not None:
            queue.state.end_in_a_fork(self._left_behind)
            return group
        self._context.log.info(
            "%s has id %s, backends %s, timeout %g s", group, group_id, chosen, seconds
        )
        self._catch_up(queue)
        return group

    def _catch_up(self, queue: CallQueue) -> None:
        """Report earlier failures, refusals and departures to a new group."""
        group_id, failure = queue.members.id, queue.failure
        with self._lock:
            known = self._failures.get(group_id) or self._membership.failure_of(queue.ranks)
            refusals = list(self._refusals.get(group_id, ()))
        if known is not None:
            failure.fail(known)
        for refusal in refusals:
            failure.on_refusal(refusal)
        for left in self._membership.departures:
            failure.do_without(left)


@lru_cache(maxsize=64)  # thread ranks compute the same ids
def _group_id(kind: str, members: tuple[int, ...], rest: str) -> str:
    digest = hashlib.sha256(f"{members} {rest}".encode()).hexdigest()[:16]
    return f"{kind}-{digest}"
