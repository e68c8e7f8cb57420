"""Logs in the store: appending to them, following them, and finding the log of a job.

A log is a key to which lines are appended; its readers sleep in the store's server. Agents of
several nodes keep one of their own in the same way (``meshlib._launcher.nodes.records``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from meshlib._events.events import JobEvent, RankEnded, RankLost
from transport._errors import StoreTimeoutError
from transport._store.base import Store
from transport._store.prefix_store import PrefixStore, underlying

T = TypeVar("T")

EVENTS = "events"
"""The job's log, in the job's store."""

LOGS = "meshrun/logs"
"""The store's key under which each World of the job has put the name of its log of events."""

ENDED = "meshrun/ended"
"""Prefix of the key, with the attempt's number, of the ranks whose programs ended well."""

STORE_SECONDS = 1.5
"""The store's time to answer after a call has failed, past the call's deadline."""


class LogReader(Generic[T]):
    """Follows the log ``key`` in ``store`` from ``offset``; ``parse`` returns a line's entry."""

    def __init__(
        self, store: Store, key: str, parse: Callable[[bytes], T], offset: int = 0
    ) -> None:
        self._store = store
        self._key = key
        self._parse = parse
        self.offset: int = offset
        """The number of bytes read so far."""

    def read(self, timeout: float) -> list[T]:
        """Return the new entries, after a wait for the first of up to ``timeout`` seconds."""
        try:
            data = self._store.tail(self._key, self.offset, timeout=timeout)
        except StoreTimeoutError:
            return []
        self.offset += len(data)
        return [self._parse(line) for line in data.splitlines()]


def publish(store: Store, event: JobEvent) -> None:
    """Append ``event`` to the job's log."""
    store.append(EVENTS, event.line())


def answer_key(ticket: str, rank: int) -> str:
    """Return where ``rank`` answers the query ``ticket``."""
    return f"answer/{ticket}/{rank}"


# ------------------------------------------------------------------ between a job and its launcher


def register_log(store: Store) -> None:
    """Tell the server of the store (a launcher) where this job's log is.

    The launcher does not know the prefixes of the job's keys.
    """
    log = EVENTS
    while isinstance(store, PrefixStore):
        log = f"{store.prefix}/{log}"
        store = store.underlying_store
    store.append(LOGS, f"{log}\n")


def ended_ranks(store: Store, attempt: str) -> list[int]:
    """Return the ranks whose programs have ended well, according to the launchers."""
    store = underlying(store)
    key = f"{ENDED}/{attempt}"
    return [int(line) for line in store.get(key).split()] if store.check([key]) else []


def announce_lost(store: Store, lost: Sequence[RankLost]) -> None:
    """Write to every log at the launcher's ``store`` that ranks are ``lost``.

    Before the first rank comes there is no log: the ranks will miss the lost ones when they meet.
    """
    for log in _logs(store):
        store.append(log, _lines(lost))


def announce_ends(store: Store, attempt: int, ranks: Sequence[int]) -> None:
    """Write that the programs of ``ranks`` have ended well, for ranks that wait for them.

    A rank that took part has left by itself, or its broken connections told the others.
    """
    # A new World registers its log first, and reads this key afterwards.
    store.append(f"{ENDED}/{attempt}", "".join(f"{rank}\n" for rank in ranks))
    for log in _logs(store, f"restart{attempt}/"):
        here = log.rpartition("/")[0] + "/here"
        absent = [rank for rank in ranks if not store.check([f"{here}/{rank}"])]
        store.append(log, _lines([RankEnded(rank) for rank in absent]))


def last_log(store: Store, attempt: int) -> str | None:
    """Return the log, at the launcher's ``store``, of the last World of ``attempt``, if any."""
    logs = _logs(store, f"restart{attempt}/")
    return logs[-1] if logs else None


def _logs(store: Store, prefix: str = "") -> list[str]:
    names = store.get(LOGS).decode().split("\n") if store.check([LOGS]) else []
    return [log for log in dict.fromkeys(names) if log and log.startswith(prefix)]


def _lines(events: Sequence[JobEvent]) -> str:
    return "".join(event.line() for event in events)
