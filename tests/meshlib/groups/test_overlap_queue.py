"""Overlap: tasks of a stream of which one lets the next begin before its own end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from meshlib.calls import overlap_queue
from meshlib.calls.call_stream import StreamThread
from meshlib.calls.overlap_queue import OverlapQueue, OverlapTask

WAIT = 60.0


def run(*tasks: Callable[[], None], stream: OverlapQueue) -> None:
    """Submit all tasks before the first begins; return when they have ended."""
    assert stream.try_enter()
    for task in tasks:
        stream.submit(task)
    stream.leave()
    assert stream.drain(WAIT)
    stream.join(WAIT)


def test_the_next_leg_begins_where_the_first_says_and_goes_on_at_its_end() -> None:
    stream, seen, before = OverlapQueue("stream"), list[str](), set(threading.enumerate())

    def task(name: str) -> None:
        seen.append(f"{name} begins")
        stream.await_former()
        seen.append(f"{name} goes on")
        stream.begin_next(0)
        seen.append(f"{name} ends")

    run(*[OverlapTask(stream, lambda name=name: task(name)) for name in "abc"], stream=stream)
    assert seen == [
        "a begins", "a goes on", "b begins", "a ends",
        "b goes on", "c begins", "b ends",
        "c goes on", "c ends",
    ]  # fmt: skip
    assert not set(threading.enumerate()) - before


def test_a_leg_that_ends_without_waiting_lets_the_first_go_on() -> None:
    stream, seen = OverlapQueue("stream"), list[object]()

    def first() -> None:
        seen.append(stream.begin_next(0))
        seen.append(stream.begin_next(0))  # two at most
        seen.append("first ends")

    others = [
        OverlapTask(stream, lambda name=name: seen.append(name)) for name in ("second", "third")
    ]
    run(OverlapTask(stream, first), *others, stream=stream)
    assert seen == ["second", True, False, "first ends", "third"]


@pytest.mark.parametrize("which", ["first", "second", "none queued", "too large"])
def test_what_is_no_leg_overlaps_with_nothing(which: str) -> None:
    stream, seen = OverlapQueue("stream"), list[object]()

    def first() -> None:
        seen.append(stream.begin_next(0))

    def second() -> None:
        stream.await_former()
        seen.append("second")

    tasks = [first if which == "first" else OverlapTask(stream, first)]
    if which != "none queued":
        tasks.append(
            second if which == "second" else OverlapTask(stream, second, which == "too large")
        )
    run(*tasks, stream=stream)
    assert seen == [False, "second"][: len(tasks)]


def test_who_runs_in_the_callers_thread_lets_nobody_begin() -> None:
    stream = OverlapQueue("stream")
    assert stream.try_enter()
    stream.submit(OverlapTask(stream, lambda: None))
    assert not stream.begin_next(0)
    stream.leave()
    stream.join(WAIT)


class NoRoom(StreamThread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_without_room_for_a_thread_legs_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, seen = OverlapQueue("stream"), list[object]()

    def first() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(overlap_queue, "StreamThread", NoRoom)
            seen.append(stream.begin_next(0))

    def second() -> None:
        stream.await_former()
        seen.append("second")

    run(OverlapTask(stream, first), OverlapTask(stream, second), stream=stream)
    assert seen == [False, "second"]
