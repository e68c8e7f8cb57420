"""How long threads look for what they wait for, and how often they ask."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from transport._waiting import spinning
from transport._waiting.spinning import PollBackoff, SpinWait


class CountedCondition:
    """Becomes true at look number ``at``; counts the looks."""

    def __init__(self, at: float = float("inf")) -> None:
        self.at = at
        self.looks = 0

    def __call__(self) -> bool:
        self.looks += 1
        return self.looks >= self.at


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that goes on by what it is given, and by a fiftieth of a look when it is read."""
    now = [1000.0]

    def read() -> float:
        now[0] += spinning.LOOK_SECONDS / 50
        return now[0]

    def go_on(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(spinning.time, "perf_counter", read)
    return go_on


@pytest.mark.parametrize("at", [1, 2, 40])
@pytest.mark.usefixtures("passes")
def test_an_event_during_the_spin_is_seen_at_once(at: int) -> None:
    condition = CountedCondition(at)
    assert SpinWait().until(condition)
    assert condition.looks == at


def test_looking_in_vain_is_done_less_and_less_often(passes: Callable[[float], None]) -> None:
    spin, pauses = SpinWait(pauses=True), list[float]()
    for _ in range(9):
        assert spin.looks
        assert not spin.until(CountedCondition())
        condition, waited = CountedCondition(), 0.0
        assert not spin.until(condition)  # which goes to sleep at once
        assert condition.looks == 1
        while not spin.looks:
            passes(0.0005)
            waited += 0.0005
        pauses.append(waited)
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.002
    assert 0.05 < pauses[-1] < 0.08


def test_one_success_forgets_what_was_in_vain(passes: Callable[[float], None]) -> None:
    spin = SpinWait(pauses=True)
    for _ in range(3):
        assert not spin.until(CountedCondition())
        passes(1.0)
    assert spin.until(CountedCondition(2))
    assert spin.looks
    assert not spin.until(CountedCondition())
    passes(0.002)  # the first pause again
    assert spin.looks


def test_it_spins_for_the_given_seconds(passes: Callable[[float], None]) -> None:
    del passes
    looked = []
    for part in (1.0, 0.5):
        condition = CountedCondition()
        assert not SpinWait(seconds=part * spinning.LOOK_SECONDS).until(condition)
        looked.append(condition.looks)
    assert 1.5 * looked[1] < looked[0] < 2.5 * looked[1]


def test_one_that_never_misses_looks_each_time() -> None:
    spin = SpinWait()
    for _ in range(3):
        condition = CountedCondition()
        assert not spin.until(condition)
        assert condition.looks > 1


def test_only_the_main_thread_looks_where_others_would_starve_it() -> None:
    spin, condition = SpinWait(main_only=True), CountedCondition(2)
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(spin.until(condition)))
    thread.start()
    thread.join(30)
    assert (seen, condition.looks) == ([False], 1)
    assert spin.until(condition)


def test_pauses_grow_up_to_the_longest_and_begin_again() -> None:
    pauses = PollBackoff(1.0, 5.0)
    assert [pauses.next() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert pauses.next(left=0.5) == 0.5
    pauses.restart()
    assert [pauses.next() for _ in range(2)] == [1.0, 2.0]
    assert [PollBackoff(1.0, 9.0, 1.5).next(), PollBackoff(3.0, 2.0).next(1.0)] == [1.0, 1.0]
