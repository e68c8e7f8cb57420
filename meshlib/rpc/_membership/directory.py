"""The workers of a job: their names and their losses."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from meshlib.rpc._errors import WorkerLostError
from transport._checks import to_whole_number
from transport._waiting.interrupts import Condition, sliced


class WorkerInfo(NamedTuple):
    """A worker: its ``name``, unique in the job, and its ``id``, its rank."""

    name: str
    id: int


class WorkerDirectory:
    """All ``size`` workers, as known to the worker ``rank`` called ``name``. Thread-safe.

    ``find`` waits at most ``timeout`` seconds for the workers' names.
    """

    def __init__(self, rank: int, size: int, name: str, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.infos: tuple[WorkerInfo, ...] = ()
        """All workers, by rank; empty until ``meet``."""
        self.lost: dict[int, str] = {}
        """The cause of each loss, by the lost worker's rank."""
        self._name = name
        self._timeout = timeout
        self._by_name: dict[str, int] = {}
        self._met = threading.Event()
        self._closed = False
        self._changed = Condition()

    def meet(self, names: Sequence[str]) -> None:
        """Set the names of all workers, by rank."""
        self.infos = tuple(WorkerInfo(name, rank) for rank, name in enumerate(names))
        self._by_name = {name: rank for rank, name in enumerate(names)}
        self._met.set()

    def close(self) -> None:
        """Wake all waiting threads, because RPC ends."""
        self._met.set()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ names

    def find(self, to: object) -> int:
        """Return the rank of a worker given by its name, its rank or its ``WorkerInfo``.

        Raises ValueError for an unknown worker, TypeError for anything else.
        """
        if type(to) is int and 0 <= to < len(self.infos):  # the usual case first
            return to
        self.await_names()
        if isinstance(to, WorkerInfo):
            to = to.id
        if isinstance(to, str):
            found = self._by_name.get(to)
            if found is None:
                names = ", ".join(repr(name) for name in sorted(self._by_name)[:16])
                raise ValueError(f"to is {to!r}, and no worker has that name; there are {names}")
            return found
        try:
            rank = to_whole_number(to, "to")
        except TypeError:
            raise TypeError(
                f"to must be a worker's name, its rank or its WorkerInfo, got {to!r}"
            ) from None
        if not 0 <= rank < len(self.infos):
            raise ValueError(f"to is {rank}; expected a rank from 0 to {len(self.infos) - 1}")
        return rank

    def await_names(self) -> None:
        """Wait until this worker knows all names; a caller may know them earlier."""
        if not self.infos:
            sliced(self._met.wait, self._timeout)

    def name_of(self, rank: int) -> str:
        """Return a worker's name."""
        if rank == self.rank:
            return self._name
        return self.infos[rank].name if self.infos else f"rank{rank}"

    def describe(self, rank: int) -> str:
        """Return a worker's name and rank, for messages."""
        return f"worker {self.name_of(rank)!r} (rank {rank})"

    # ------------------------------------------------------------------ losses

    def lose(self, rank: int, how: str) -> bool:
        """Record the loss of a worker; return False if it is already recorded."""
        with self._changed:
            if rank in self.lost:
                return False
            self.lost[rank] = how
            self._changed.notify_all()
        return True

    def await_loss(self, rank: int, seconds: float) -> None:
        """Wait until a worker is lost, for at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self.lost or self._closed, seconds)

    def lost_error(self, rank: int, what: str = "", begun: float = 0.0) -> WorkerLostError:
        """Return the error for a lost worker, on which ``what`` was called at ``begun``."""
        since = f", {time.monotonic() - begun:.1f} s after {what} was called there" if what else ""
        text = f"{self.describe(rank)} {self.lost.get(rank, 'is lost')}{since}"
        return WorkerLostError(text, rank, self.name_of(rank))
