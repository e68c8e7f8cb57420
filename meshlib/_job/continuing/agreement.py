"""``Agreement``: the surviving ranks settle who goes on, and on the values that they proposed.

After a failure no group can be trusted, so survivors talk through the store. Where a launcher
serves the store, it outlives any rank:

1. Each rank appends its proposal to the agreement's log, and tries to become the *coordinator*:
   the first one does (``compare_set``).
2. The coordinator reads the log until all ranks have spoken, except lost and excluded ones. It
   asks a late rank for a sign of life, which the rank's watcher gives while the program computes.
   It waits for a slow rank up to the deadline, and leaves out a silent one (stopped, wedged).
3. The coordinator writes the decision, once (``compare_set``), and publishes it in the job's log.
   All ranks follow the decision, also a late one that finds itself left out.

The coordinator holds a lease, which it renews while it waits. Another rank takes a lease that was
not renewed, or whose holder is lost. Two coordinators do no harm, because a decision is written
once. A rank that cannot reach the store agrees on nothing: of a job that is cut in two, at most the
part with the store goes on. Each rank sends a few messages, whatever the number of ranks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from meshlib._events.events import Agreed, Query
from meshlib._events.log import STORE_SECONDS, answer_key, publish
from meshlib._job.membership import JobMembership
from meshlib._plain_text import first_of
from transport._errors import CollectiveTimeoutError, StoreTimeoutError
from transport._store.base import Store
from transport._waiting.deadline import Deadline

PROBE_AFTER_SECONDS = 0.5
"""The delay after which a rank that others wait for is asked for a sign of life."""
LIFE_SECONDS = 2.0
"""The time that it has to answer: its watcher needs milliseconds, unless the machine is busy."""
LEASE_SECONDS = 2.0
"""The longest time between two renewals of the coordinator's lease."""
_LOOK_SECONDS = 0.02

Proposals = Mapping[int, Any]
"""The proposals of the ranks that take part, by rank."""
Decide = Callable[[Proposals, Mapping[int, str]], Any]
"""``decide(proposals, missing)`` returns the decision as JSON's values, or None to wait for ranks.

``missing`` has the reasons of the members that are left out.
"""


class Agreement:
    """One agreement of ``members`` (identities), called ``name`` by all of them.

    The agreement does not wait for the ``excluded`` members, even if they are there.
    """

    def __init__(
        self,
        store: Store,
        membership: JobMembership,
        name: str,
        members: Sequence[int],
        excluded: Collection[int] = (),
    ) -> None:
        self._store = store.with_grace(STORE_SECONDS)
        self._membership = membership
        self._name = name
        self._members = tuple(members)
        self._excluded = set(excluded)
        self._proposals: dict[int, Any] = {}
        self._silent: dict[int, str] = {}
        self._offset = 0
        self._lease = b""
        self._renewed = 0.0
        self._probe_after = PROBE_AFTER_SECONDS
        self._begun = 0.0
        self._deadline = Deadline.after(0)

    def reach(self, proposal: Any, decide: Decide, timeout: float, wait: float = 0.0) -> Any:
        """Propose ``proposal`` (JSON's values) and return the decision.

        Every rank's ``decide`` must return the same for the same arguments: the coordinator's is
        called. It waits for slow ranks up to ``timeout`` seconds. If ``decide`` wants more ranks,
        it is called again for ``wait`` seconds; then the decision is None. Raises DistStoreError
        when the store cannot be reached: this rank is cut off, and must not go on. Raises
        CollectiveTimeoutError when there is no decision in time.
        """
        membership, name = self._membership, self._name
        self._begun = time.monotonic()
        deadline = Deadline.after(timeout)
        self._deadline = Deadline.after(max(timeout, wait))
        me = f"{membership.rank} {os.urandom(4).hex()}"
        line = json.dumps([membership.rank, proposal, sorted(self._excluded)])
        self._store.append(self._key("proposals"), line + "\n")
        self._lease = self._store.compare_set(self._key("lease"), "", f"{me} 0")
        while (text := membership.agreed(name)) is None:
            if self._lease.startswith(me.encode()):
                self._coordinate(me, decide, deadline)
            else:
                self._follow(me)
        return json.loads(text)

    def _key(self, what: str) -> str:
        return f"agree/{self._name}/{what}"

    # ------------------------------------------------------------------ the coordinator

    def _coordinate(self, me: str, decide: Decide, deadline: Deadline) -> None:
        """Wait a moment for proposals; publish the decision when it can be made."""
        if time.monotonic() - self._renewed > LEASE_SECONDS / 4:
            self._renewed = time.monotonic()
            term = f"{me} {self._renewed:.3f}"
            held = self._store.compare_set(self._key("lease"), self._lease, term)
            self._lease = held
            if held != term.encode():
                return
        # The job's log tells of lost ranks, so the wait is for the others only.
        awaited = self._awaited()
        self._read(_LOOK_SECONDS if awaited else 0.0)
        awaited = self._awaited()
        late = time.monotonic() - self._begun
        if awaited and deadline.expired:
            self._silent |= dict.fromkeys(awaited, f"has not come in {deadline.seconds:g} s")
        elif awaited and late > self._probe_after:
            self._probe(awaited)
        if self._awaited():
            return
        decision = decide(dict(self._proposals), self._missing())
        if decision is None and not self._deadline.expired:
            self._membership.wait_for_change(lambda: False, _LOOK_SECONDS)
            return
        text = json.dumps(decision)
        # Another coordinator may have decided, and ended before it could publish.
        text = self._store.compare_set(self._key("decision"), "", text).decode()
        publish(self._store, Agreed(self._name, text))
        self._membership.note_agreed(self._name, text)

    def _read(self, timeout: float) -> None:
        with suppress(StoreTimeoutError):
            data = self._store.tail(self._key("proposals"), self._offset, timeout=timeout)
            self._offset += len(data)
            for text in data.splitlines():
                rank, proposal, excluded = json.loads(text)
                self._proposals[rank] = proposal
                self._silent.pop(rank, None)
                self._excluded.update(excluded)

    def _awaited(self) -> list[int]:
        """Return the ranks whose proposals are still expected."""
        membership = self._membership
        gone = membership.lost.keys() | membership.left | self._excluded
        return [
            rank
            for rank in self._members
            if rank not in self._proposals and rank not in gone and rank not in self._silent
        ]

    def _missing(self) -> dict[int, str]:
        """Return the reasons of the members that are left out."""
        lost, left = self._membership.lost, self._membership.left
        found: dict[int, str] = {}
        for rank in self._members:
            if rank in self._excluded:
                found[rank] = "was excluded"
            elif rank in lost:
                found[rank] = str(lost[rank])
            elif rank in left:
                found[rank] = "has left the job"
            elif rank in self._silent:
                found[rank] = self._silent[rank]
        return found

    def _probe(self, ranks: Sequence[int]) -> None:
        """Query ``ranks``, and note which do not answer. Their watchers answer even in a call."""
        ticket = os.urandom(8).hex()
        publish(self._store, Query(self._name, 0, ticket))
        deadline = Deadline.after(LIFE_SECONDS)
        for rank in ranks:
            try:
                self._store.get(answer_key(ticket, rank), timeout=deadline.remaining())
            except StoreTimeoutError:
                self._silent[rank] = f"gave no sign of life for {LIFE_SECONDS:g} s"
        # The ranks that answered are queried again, after a while.
        self._begun, self._probe_after = time.monotonic(), 2 * self._probe_after

    # ------------------------------------------------------------------ the others

    def _follow(self, me: str) -> None:
        """Wait for the decision; take the lease when its holder is gone or silent."""
        membership = self._membership
        holder = int(self._lease.split()[0])

        def due() -> bool:
            return membership.agreed(self._name) is not None or self._is_gone(holder)

        if not membership.wait_for_change(due, LEASE_SECONDS) or self._is_gone(holder):
            if membership.agreed(self._name) is not None:
                return
            # This rank gets the lease unless it was renewed or taken meanwhile.
            now = self._store.compare_set(self._key("lease"), self._lease, f"{me} 0")
            mine = now.startswith(me.encode())
            self._lease = now
            if mine:
                self._begun = time.monotonic()
            elif time.monotonic() > self._deadline.at + 3 * LEASE_SECONDS:
                raise CollectiveTimeoutError(
                    f"the agreement {self._name!r} of the ranks [{first_of(self._members)}] was not"
                    f" settled after {self._deadline.seconds:g} s"
                )

    def _is_gone(self, rank: int) -> bool:
        return rank in self._membership.lost or rank in self._membership.left
