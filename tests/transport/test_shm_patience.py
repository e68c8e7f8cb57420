"""Ranks that share a core by chance get apart."""

from __future__ import annotations

import os
import time

import pytest

from transport.shm import patience
from transport.shm.patience import Patience


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return when ranks moved to another core, which none really does."""
    moved: list[float] = []
    monkeypatch.setattr(patience, "leave_core", lambda: moved.append(time.perf_counter()))
    return moved


def wait(rank: Patience, times: int, monkeypatch: pytest.MonkeyPatch, turn: float) -> None:
    """Have ``rank`` wait, and find what it waits for after one yield, which took so long."""
    monkeypatch.setattr(os, "sched_yield", lambda: time.sleep(turn))
    for _ in range(times):
        assert rank._yield_until(lambda: True)


def test_a_rank_moves_after_some_turns_and_not_again_at_once(
    monkeypatch: pytest.MonkeyPatch, moves: list[float]
) -> None:
    monkeypatch.setattr(patience, "_LAST_RETRY_SECONDS", 3600.0)
    rank = Patience(1)
    rank._retry = 3600.0
    rank._may_move = time.perf_counter()
    wait(rank, patience._TURNS_TO_MOVE - 1, monkeypatch, 1e-4)
    assert not moves
    wait(rank, 1, monkeypatch, 1e-4)
    assert len(moves) == 1
    wait(rank, 3 * patience._TURNS_TO_MOVE, monkeypatch, 1e-4)
    assert len(moves) == 1


def test_ranks_without_a_core_each_stay(
    monkeypatch: pytest.MonkeyPatch, moves: list[float]
) -> None:
    rank = Patience(len(os.sched_getaffinity(0)) + 1)
    wait(rank, 3 * patience._TURNS_TO_MOVE, monkeypatch, 1e-4)
    assert not moves


def test_who_moves_may_use_the_same_cores_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    patience.leave_core()
    assert os.sched_getaffinity(0) == before
    asked: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, cores: asked.append(set(cores)))
    monkeypatch.setattr(patience, "_current_core", lambda: 5)
    patience.leave_core()
    assert asked == [{3, 7}, {3, 5, 7}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {5})
    patience.leave_core()
    assert len(asked) == 2
