"""Logs in the store: appending to them, following them, and who knows where a job's log is.

A log is a key that lines are appended to; who follows it sleeps in the store's server. Agents of
several nodes keep one of their own in the same way (``meshlib.launcher.nodes.records``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from meshlib.events.events import Event, RankEnded, RankLost
from transport.errors import StoreTimeoutError
from transport.store.base import Store
from transport.store.prefix_store import PrefixStore, underlying

T = TypeVar("T")

EVENTS = "events"
"""The job's log, in the job's store."""

LOGS = "meshrun/logs"
"""The store's key under which each World of the job has put the name of its log of events."""

ENDED = "meshrun/ended"
"""Under this and the attempt's number, the ranks whose programs have ended well, a line each."""

STORE_SECONDS = 1.5
"""What the store may take for an answer when a call has failed: its deadline has passed already."""


class LogReader(Generic[T]):
    """Follows the log ``key`` in ``store`` from ``offset``; ``parse`` returns a line's entry."""

    def __init__(
        self, store: Store, key: str, parse: Callable[[bytes], T], offset: int = 0
    ) -> None:
        self._store = store
        self._key = key
        self._parse = parse
        self.offset: int = offset
        """How many bytes have been read."""

    def read(self, timeout: float) -> list[T]:
        """Return the entries that are new, having waited for one up to ``timeout`` seconds."""
        try:
            news = self._store.tail(self._key, self.offset, timeout=timeout)
        except StoreTimeoutError:
            return []
        self.offset += len(news)
        return [self._parse(line) for line in news.splitlines()]


def publish(store: Store, event: Event) -> None:
    """Append ``event`` to the job's log."""
    store.append(EVENTS, event.line())


def answer_key(ticket: str, rank: int) -> str:
    """Return where ``rank`` answers the query ``ticket``."""
    return f"answer/{ticket}/{rank}"


# ------------------------------------------------------------------ between a job and its launcher


def register_log(store: Store) -> None:
    """Let whoever serves the store (a launcher) know where this job's log is.

    The launcher does not know under which prefixes the job keeps its keys.
    """
    log = EVENTS
    while isinstance(store, PrefixStore):
        log = f"{store.prefix}/{log}"
        store = store.underlying_store
    store.append(LOGS, f"{log}\n")


def ended_ranks(store: Store, attempt: str) -> list[int]:
    """Return the ranks whose programs have ended well, as far as a launcher has said so."""
    store = underlying(store)
    key = f"{ENDED}/{attempt}"
    return [int(line) for line in store.get(key).split()] if store.check([key]) else []


def announce_lost(store: Store, lost: Sequence[RankLost]) -> None:
    """Write to every log at the launcher's ``store`` that ranks are ``lost``.

    Where no rank has come so far there is no log: they will miss those when they meet.
    """
    for log in _logs(store):
        store.append(log, _lines(lost))


def announce_ends(store: Store, attempt: int, ranks: Sequence[int]) -> None:
    """Write that the programs of ``ranks`` have ended well, for those who wait for them to come.

    A rank that took part has said goodbye by itself, or its connections told.
    """
    # A World that is made in between writes its log first and reads this afterwards.
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
    said = store.get(LOGS).decode().split("\n") if store.check([LOGS]) else []
    return [log for log in dict.fromkeys(said) if log and log.startswith(prefix)]


def _lines(events: Sequence[Event]) -> str:
    return "".join(event.line() for event in events)
