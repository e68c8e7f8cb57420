"""Legs: tasks of a lane of which one lets the next begin before its own end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from meshlib.calls import legs
from meshlib.calls.lane import LaneThread
from meshlib.calls.legs import Leg, LegLane

WAIT = 60.0


def run(*tasks: Callable[[], None], lane: LegLane) -> None:
    """Submit all tasks before the first begins; return when they have ended."""
    assert lane.try_enter()
    for task in tasks:
        lane.submit(task)
    lane.leave()
    assert lane.drain(WAIT)
    lane.join(WAIT)


def test_the_next_leg_begins_where_the_first_says_and_goes_on_at_its_end() -> None:
    lane, seen, before = LegLane("lane"), list[str](), set(threading.enumerate())

    def task(name: str) -> None:
        seen.append(f"{name} begins")
        lane.await_former()
        seen.append(f"{name} goes on")
        lane.begin_next(0)
        seen.append(f"{name} ends")

    run(*[Leg(lane, lambda name=name: task(name)) for name in "abc"], lane=lane)
    assert seen == [
        "a begins", "a goes on", "b begins", "a ends",
        "b goes on", "c begins", "b ends",
        "c goes on", "c ends",
    ]  # fmt: skip
    assert not set(threading.enumerate()) - before


def test_a_leg_that_ends_without_waiting_lets_the_first_go_on() -> None:
    lane, seen = LegLane("lane"), list[object]()

    def first() -> None:
        seen.append(lane.begin_next(0))
        seen.append(lane.begin_next(0))  # two at most
        seen.append("first ends")

    others = [Leg(lane, lambda name=name: seen.append(name)) for name in ("second", "third")]
    run(Leg(lane, first), *others, lane=lane)
    assert seen == ["second", True, False, "first ends", "third"]


@pytest.mark.parametrize("which", ["first", "second", "none queued", "too large"])
def test_what_is_no_leg_overlaps_with_nothing(which: str) -> None:
    lane, seen = LegLane("lane"), list[object]()

    def first() -> None:
        seen.append(lane.begin_next(0))

    def second() -> None:
        lane.await_former()
        seen.append("second")

    tasks = [first if which == "first" else Leg(lane, first)]
    if which != "none queued":
        tasks.append(second if which == "second" else Leg(lane, second, which == "too large"))
    run(*tasks, lane=lane)
    assert seen == [False, "second"][: len(tasks)]


def test_who_runs_in_the_callers_thread_lets_nobody_begin() -> None:
    lane = LegLane("lane")
    assert lane.try_enter()
    lane.submit(Leg(lane, lambda: None))
    assert not lane.begin_next(0)
    lane.leave()
    lane.join(WAIT)


class NoRoom(LaneThread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_without_room_for_a_thread_legs_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, seen = LegLane("lane"), list[object]()

    def first() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(legs, "LaneThread", NoRoom)
            seen.append(lane.begin_next(0))

    def second() -> None:
        lane.await_former()
        seen.append("second")

    run(Leg(lane, first), Leg(lane, second), lane=lane)
    assert seen == [False, "second"]
