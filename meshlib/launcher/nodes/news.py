"""Telling the ranks that one of them is gone, through the log that their watchers follow."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence

from meshlib.launcher.ranks.failure import RankExit
from transport.errors import DistError
from transport.store.base import Store
from transport.store.tcp.store import TCPStore

LOGS = "meshrun/logs"
"""The store's key under which each World of the job has put the name of its log of events."""

ENDED = "meshrun/ended"
"""Under this and the attempt's number, the ranks whose programs have ended well, a line each."""

_SECONDS = 2.0


def announce_exit(host: str, port: int, secret: bytes, exit_: RankExit) -> None:
    """Write to the logs at a store that a rank has failed, if the store can be reached."""
    tell(host, port, secret, lambda store: announce(store, [(exit_.rank, how(exit_))]))


def tell(host: str, port: int, secret: bytes, news: Callable[[Store], None]) -> None:
    """Call ``news`` with a store, if it can be reached."""
    with contextlib.suppress(DistError):
        store = TCPStore(host, port, timeout=_SECONDS, secret=secret)
        with contextlib.closing(store):
            news(store)


def announce(store: Store, lost: Iterable[tuple[int, str]]) -> None:
    """Write to every log that the ranks in ``lost`` are gone; the words complete "rank 1 …"."""
    if not store.check([LOGS]):
        return  # no rank has come so far: they will miss this one when they meet
    lines = "".join(json.dumps(event(rank, words)) + "\n" for rank, words in lost)
    for log in dict.fromkeys(store.get(LOGS).decode().split("\n")):
        if log:
            store.append(log, lines)


def announce_ends(store: Store, attempt: int, ranks: Sequence[int]) -> None:
    """Write that the programs of ``ranks`` have ended well, for those who wait for them to come.

    A rank that took part has said goodbye by itself, or its connections told.
    """
    # A World that is made in between writes its log first and reads this afterwards.
    store.append(f"{ENDED}/{attempt}", "".join(f"{rank}\n" for rank in ranks))
    if not store.check([LOGS]):
        return
    for log in dict.fromkeys(store.get(LOGS).decode().split("\n")):
        if log.startswith(f"restart{attempt}/"):
            here = log.rpartition("/")[0] + "/here"
            absent = [rank for rank in ranks if not store.check([f"{here}/{rank}"])]
            store.append(log, "".join(json.dumps(ended_event(rank)) + "\n" for rank in absent))


def ended_event(rank: int) -> dict[str, object]:
    """Return what tells watchers that ``rank``, in the launcher's numbering, will never come."""
    return {"kind": "ended", "rank": rank, "how": "ended with exit code 0 and has not joined"}


def event(rank: int, words: str) -> dict[str, object]:
    """Return what watchers understand; ``diagnosis.failures`` has the same, behind NumPy."""
    return {"kind": "rank_exit", "rank": rank, "how": words}


def how(exit_: RankExit) -> str:
    """Return what happened to a rank, to be put behind its name."""
    if exit_.error is not None:
        return f"ended with {exit_.error.summary()}"
    if exit_.code < 0:
        return f"was killed by {exit_.exit_name}"
    return f"ended with {exit_.exit_name}"
