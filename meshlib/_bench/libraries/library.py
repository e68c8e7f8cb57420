"""The interface of a measured library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import ClassVar

import numpy as np

from meshlib._bench.cases import Bound, Case, Floats

TIMEOUT = timedelta(minutes=5)
LOOPBACK = "127.0.0.1"


class Library(ABC):
    """One library, in a rank's process."""

    name: ClassVar[str]
    launcher: ClassVar[tuple[str, ...]] = ()
    """The command that starts the ranks, without ``-n SIZE`` and the program. If it is empty, each
    rank is started separately."""

    rank_variable: ClassVar[str] = ""
    """The variable in which the launcher passes a rank's number."""

    cases: ClassVar[frozenset[str] | None] = None
    """The cases that the library supports; None for all."""

    @abstractmethod
    def host(self, size: int) -> int:
        """Start the job's store in this process and return its port; ``join`` is the next call."""

    @abstractmethod
    def join(self, port: int, rank: int, size: int) -> None:
        """Enter the job whose store listens on ``port`` of this machine."""

    @abstractmethod
    def barrier(self) -> object:
        """Wait for all ranks."""

    @abstractmethod
    def bind(self, case: Case) -> Bound:
        """Return the call of ``case`` on its arrays, with all preparation done."""

    @abstractmethod
    def version(self) -> str:
        """Return the name and version of the measured library."""

    @abstractmethod
    def leave(self) -> None:
        """Leave the job."""

    def empty(self, count: int, most: int) -> Floats:
        """Return an array of ``count`` float32 for a case; no rank needs more than ``most``."""
        return np.empty(count, np.float32)

    def result(self, case: Case) -> Floats:
        """Return the array with the result of the last call."""
        return case.output


def ping_pong(rank: int, send: Callable[[int], object], receive: Callable[[int], object]) -> Bound:
    """Return this rank's part of a ping-pong between ranks 0 and 1."""

    def ping() -> None:
        send(1)
        receive(1)

    def pong() -> None:
        receive(0)
        send(0)

    return ping if rank == 0 else pong if rank == 1 else lambda: None
