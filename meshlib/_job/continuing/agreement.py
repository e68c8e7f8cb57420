"""``Agreement``: the surviving ranks agree on the next members and on a decision.

After a failure no group can be trusted, so the survivors communicate through the store. A store
that the launcher serves outlives any rank.

1. Each rank appends its proposal to the agreement's log and tries to become the *coordinator*
   with ``compare_set``; the first rank succeeds.
2. The coordinator reads the log until it has the proposals of all ranks that are not lost or
   excluded. It probes a late rank, whose watcher answers even while the program computes. It waits
   for a slow rank until the deadline, and excludes a silent one (stopped, stuck).
3. The coordinator writes the decision once (``compare_set``), and publishes it in the job's log.
   All ranks follow the decision, including an excluded rank that arrives late.

The coordinator holds a lease, which it renews while it waits. Another rank takes over a lease that
was not renewed or whose holder is lost. Two coordinators do no harm, because the decision is
written once. A rank that cannot reach the store agrees on nothing: after a network partition, only
the part with the store continues. Each rank sends a few messages, independent of the job's size.
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
"""The delay after which the coordinator probes a late rank."""
LIFE_SECONDS = 2.0
"""The time that the late rank's watcher has to answer."""
LEASE_SECONDS = 2.0
"""The longest time between two renewals of the coordinator's lease."""
_POLL_SECONDS = 0.02

Proposals = Mapping[int, Any]
"""The proposals of the participating ranks, by rank."""
Decide = Callable[[Proposals, Mapping[int, str]], Any]
"""``decide(proposals, missing)`` returns the decision as JSON values, or None to wait for ranks.

``missing`` maps each excluded, lost, departed or silent member to the reason.
"""


class Agreement:
    """One agreement of ``members`` (identities); ``name`` is the same on all of them.

    It does not wait for the ``excluded`` members, even if they are alive.
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
        """Propose ``proposal`` (JSON values) and return the decision.

        The coordinator calls ``decide``, which must return equal results on all ranks for equal
        arguments. The coordinator waits for slow ranks up to ``timeout`` seconds. If ``decide``
        returns None, it is called again for up to ``wait`` seconds; then the decision is None.
        Raises DistStoreError if the store cannot be reached; this rank must then not continue.
        Raises CollectiveTimeoutError if there is no decision in time.
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
        """Wait briefly for proposals; publish the decision when it can be made."""
        if time.monotonic() - self._renewed > LEASE_SECONDS / 4:
            self._renewed = time.monotonic()
            term = f"{me} {self._renewed:.3f}"
            held = self._store.compare_set(self._key("lease"), self._lease, term)
            self._lease = held
            if held != term.encode():
                return
        # Lost ranks are known from the job's log, so wait only for the others.
        awaited = self._awaited()
        self._read(_POLL_SECONDS if awaited else 0.0)
        awaited = self._awaited()
        late = time.monotonic() - self._begun
        if awaited and deadline.expired:
            self._silent |= dict.fromkeys(awaited, f"did not arrive within {deadline.seconds:g} s")
        elif awaited and late > self._probe_after:
            self._probe(awaited)
        if self._awaited():
            return
        decision = decide(dict(self._proposals), self._missing())
        if decision is None and not self._deadline.expired:
            self._membership.wait_for_change(lambda: False, _POLL_SECONDS)
            return
        text = json.dumps(decision)
        # Another coordinator may have decided, and died before it could publish.
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
        """Return the excluded, lost, departed and silent members, with the reasons."""
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
        """Query ``ranks``; record those that do not answer. Watchers answer even during a call."""
        ticket = os.urandom(8).hex()
        publish(self._store, Query(self._name, 0, ticket))
        deadline = Deadline.after(LIFE_SECONDS)
        for rank in ranks:
            try:
                self._store.get(answer_key(ticket, rank), timeout=deadline.remaining())
            except StoreTimeoutError:
                self._silent[rank] = f"gave no sign of life for {LIFE_SECONDS:g} s"
        # Ranks that answered are queried again later.
        self._begun, self._probe_after = time.monotonic(), 2 * self._probe_after

    # ------------------------------------------------------------------ the other ranks

    def _follow(self, me: str) -> None:
        """Wait for the decision; take over the lease if its holder is gone or silent."""
        membership = self._membership
        holder = int(self._lease.split()[0])

        def due() -> bool:
            return membership.agreed(self._name) is not None or self._is_gone(holder)

        if not membership.wait_for_change(due, LEASE_SECONDS) or self._is_gone(holder):
            if membership.agreed(self._name) is not None:
                return
            # This rank gets the lease unless another rank has renewed or taken it meanwhile.
            now = self._store.compare_set(self._key("lease"), self._lease, f"{me} 0")
            mine = now.startswith(me.encode())
            self._lease = now
            if mine:
                self._begun = time.monotonic()
            elif time.monotonic() > self._deadline.at + 3 * LEASE_SECONDS:
                raise CollectiveTimeoutError(
                    f"the agreement {self._name!r} of the ranks [{first_of(self._members)}] was not"
                    f" reached within {self._deadline.seconds:g} s"
                )

    def _is_gone(self, rank: int) -> bool:
        return rank in self._membership.lost or rank in self._membership.left
