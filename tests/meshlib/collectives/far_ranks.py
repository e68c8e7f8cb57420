"""Calls of ranks whose links claim to have delay, and which of them begin before others end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshlib as dist
from transport.algorithms.exchanges.overlap import Overlap
from transport.link import Outbox
from transport.tcp.link import TcpLink

COUNT = 700_000  # two laps of a reduction between two ranks
Calls = list[Callable[..., Any]]


class Begun:
    """How often a call was to let the next one begin, and had one begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.once = threading.Event()
        let_next = Overlap.let_next

        def noted(overlap: Overlap, outbox: Outbox) -> bool:
            begun = let_next(overlap, outbox)
            if begun:
                self.once.set()
            return begun

        monkeypatch.setattr(Overlap, "let_next", noted)
        monkeypatch.setattr(TcpLink, "window", 4 << 20)


class Order:
    """Has rank 0 issue its calls first, and the others when it has."""

    def __init__(self) -> None:
        self._issued = threading.Event()

    def issue(self, calls: Calls) -> list[dist.Work[Any]]:
        if dist.get_rank() != 0:
            assert self._issued.wait(60)
        works = [call(async_op=True) for call in calls]
        self._issued.set()
        return works


def settle(group: dist.ProcessGroup | None = None) -> None:
    """Make the calls in which members agree that their links are far."""
    for _ in range(4):
        dist.all_reduce(np.ones(3 * COUNT, np.float32), group=group)
