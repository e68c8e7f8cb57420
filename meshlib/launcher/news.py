"""Telling the ranks that one of them is gone, through the log that their watchers follow."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable

from meshlib.launcher.failure import RankExit
from transport.errors import DistError
from transport.store.base import Store
from transport.store.tcp_store import TCPStore

LOGS = "meshrun/logs"
"""The store's key under which each World of the job has put the name of its log of events."""

_SECONDS = 2.0


def announce_exit(host: str, port: int, secret: bytes, exit_: RankExit) -> None:
    """Write to the logs at a store that a rank has failed, if the store can be reached."""
    with contextlib.suppress(DistError):
        store = TCPStore(host, port, timeout=_SECONDS, secret=secret)
        with contextlib.closing(store):
            announce(store, [(exit_.rank, how(exit_))])


def announce(store: Store, lost: Iterable[tuple[int, str]]) -> None:
    """Write to every log that the ranks in ``lost`` are gone; the words complete "rank 1 …"."""
    if not store.check([LOGS]):
        return  # no rank has come so far: they will miss this one when they meet
    lines = "".join(json.dumps(event(rank, words)) + "\n" for rank, words in lost)
    for log in dict.fromkeys(store.get(LOGS).decode().split("\n")):
        if log:
            store.append(log, lines)


def event(rank: int, words: str) -> dict[str, object]:
    """Return what watchers understand; ``meshlib.failures`` has the same, behind NumPy."""
    return {"kind": "rank_exit", "rank": rank, "how": words}


def how(exit_: RankExit) -> str:
    """Return what happened to a rank, to be put behind its name."""
    if exit_.error is not None:
        return f"ended with {exit_.error.summary()}"
    if exit_.code < 0:
        return f"was killed by {exit_.exit_name}"
    return f"ended with {exit_.exit_name}"
