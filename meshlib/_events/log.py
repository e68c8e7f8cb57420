"""Logs in the store: appending to them, following them, and finding the log of a job.

A log is a key to which lines are appended; its readers sleep in the store's server. The agents of
several nodes have another log of this kind (``meshlib._launcher.nodes.records``).
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
"""The store's key with the names of the logs of all Worlds of the job."""

ENDED = "meshrun/ended"
"""Prefix of the key, with the attempt's number, of the ranks whose programs succeeded."""

STORE_SECONDS = 1.5
"""The time for the store to answer after a call has failed, beyond the call's deadline."""


class LogReader(Generic[T]):
    """A reader of the log ``key`` in ``store``, from ``offset``; ``parse`` makes a line's entry."""

    def __init__(
        self, store: Store, key: str, parse: Callable[[bytes], T], offset: int = 0
    ) -> None:
        self._store = store
        self._key = key
        self._parse = parse
        self.offset: int = offset
        """The number of bytes read so far."""

    def read(self, timeout: float) -> list[T]:
        """Wait up to ``timeout`` seconds for new entries; return them, or an empty list."""
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
    """Return the key of the answer of ``rank`` to the query ``ticket``."""
    return f"answer/{ticket}/{rank}"


# ------------------------------------------------------------------ between a job and its launcher


def register_log(store: Store) -> None:
    """Register the name of this job's log with the launcher, which serves the store.

    The launcher does not know the prefixes of the job's keys.
    """
    log = EVENTS
    while isinstance(store, PrefixStore):
        log = f"{store.prefix}/{log}"
        store = store.underlying_store
    store.append(LOGS, f"{log}\n")


def ended_ranks(store: Store, attempt: str) -> list[int]:
    """Return the ranks whose programs have succeeded, according to the launchers."""
    store = underlying(store)
    key = f"{ENDED}/{attempt}"
    return [int(line) for line in store.get(key).split()] if store.check([key]) else []


def announce_lost(store: Store, lost: Sequence[RankLost]) -> None:
    """Append the ``lost`` ranks to every log at the launcher's ``store``.

    Before the first rank joins there is no log; the ranks' rendezvous then reports missing ranks.
    """
    for log in _logs(store):
        store.append(log, _lines(lost))


def announce_ends(store: Store, attempt: int, ranks: Sequence[int]) -> None:
    """Publish that the programs of ``ranks`` have succeeded, for ranks that wait for them.

    Only for ranks that never joined: others have left by themselves, or broken connections
    reported them.
    """
    # A new World registers its log before it reads this key.
    store.append(f"{ENDED}/{attempt}", "".join(f"{rank}\n" for rank in ranks))
    for log in _logs(store, f"restart{attempt}/"):
        here = log.rpartition("/")[0] + "/here"
        absent = [rank for rank in ranks if not store.check([f"{here}/{rank}"])]
        store.append(log, _lines([RankEnded(rank) for rank in absent]))


def last_log(store: Store, attempt: int) -> str | None:
    """Return the log, at the launcher's ``store``, of the last World of ``attempt``, or None."""
    logs = _logs(store, f"restart{attempt}/")
    return logs[-1] if logs else None


def _logs(store: Store, prefix: str = "") -> list[str]:
    names = store.get(LOGS).decode().split("\n") if store.check([LOGS]) else []
    return [log for log in dict.fromkeys(names) if log and log.startswith(prefix)]


def _lines(events: Sequence[JobEvent]) -> str:
    return "".join(event.line() for event in events)
