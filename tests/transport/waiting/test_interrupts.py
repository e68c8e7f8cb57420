"""Where Ctrl-C is raised: at waits of the library, as it returns, and anywhere in the program."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.transport.interrupts import deferred, in_thread
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import (
    Condition,
    InterruptHandler,
    look,
    next_slice,
    run_outside,
    sliced,
)

PROGRAMS = Path(__file__).parent / "programs"

SOON = 30.0
_LIBRARY = (PROGRAMS / "interrupted_library.py").read_text()


@pytest.fixture
def library() -> Generator[Any]:
    """A module of the library, with Ctrl-C deferred."""
    module = ModuleType("transport.made_by_the_test")
    exec(_LIBRARY, module.__dict__)
    with deferred():
        yield module
        assert sys.getprofile() is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def soon() -> None:
    """Have SIGINT come while this thread waits."""
    in_thread(lambda: (threading.Event().wait(0.02), os.kill(os.getpid(), signal.SIGINT)))


def test_it_is_raised_as_the_library_returns(library: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        library.deeper(None)
    assert library.done == ["went on", "cleaned up"]
    look()  # it was raised once


@pytest.mark.parametrize("name", ["fails", "within"])
def test_also_where_it_raises_or_yields(library: Any, name: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        next(getattr(library, name)())


def test_a_second_one_is_raised_at_once(library: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        library.twice()
    assert library.done == ["went on"]
    look()


def _wait_for_a_condition() -> None:
    condition = Condition()
    try:
        with condition:
            condition.wait(SOON)
    finally:
        assert in_thread(lambda: condition.acquire(timeout=SOON)).result(SOON)


def _wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    sliced(lambda seconds: lock.acquire(timeout=seconds), SOON)


def _poll() -> None:
    deadline = Deadline.after(SOON)
    while not deadline.expired:
        threading.Event().wait(deadline.piece())


WAITS = [_wait_for_a_condition, _wait_for_a_lock, _poll]


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("before", [False, True], ids=["during the wait", "before"])
def test_waits_raise_it(library: Any, wait: Callable[[], None], before: bool) -> None:
    def call() -> None:
        library.interrupted() if before else soon()
        wait()

    with pytest.raises(KeyboardInterrupt):
        library.call(call)


def test_the_program_is_interrupted_anywhere(library: Any) -> None:
    def program() -> None:
        soon()
        while True:
            pass

    with pytest.raises(KeyboardInterrupt):
        program()
    with pytest.raises(KeyboardInterrupt):
        library.call(run_outside, program)


def test_a_program_that_is_profiled_is_interrupted_at_the_next_wait(library: Any) -> None:
    def profiler(*_: object) -> None:
        pass

    sys.setprofile(profiler)
    try:
        assert library.interrupted() == 5
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    with pytest.raises(KeyboardInterrupt):
        next_slice()


def test_other_threads_are_neither_interrupted_nor_woken(library: Any) -> None:
    sys.setprofile(lambda *_: None)  # the main thread's is raised at a wait alone
    try:
        library.interrupted()
        assert in_thread(lambda: next_slice(7.0)).result(SOON) == 7.0
    finally:
        sys.setprofile(None)
        with pytest.raises(KeyboardInterrupt):
            look()


def test_a_handler_of_the_programs_own_stays() -> None:
    def mine(*_: object) -> None:
        pass

    before = signal.signal(signal.SIGINT, mine)
    try:
        handler = InterruptHandler("transport")
        handler.install()
        handler.restore()
        assert signal.getsignal(signal.SIGINT) is mine
        look()
    finally:
        signal.signal(signal.SIGINT, before)
    handler = InterruptHandler("transport")
    in_thread(handler.install).result(SOON)
    assert signal.getsignal(signal.SIGINT) is before
    handler.install()
    signal.signal(signal.SIGINT, mine)
    handler.restore()
    assert signal.signal(signal.SIGINT, before) is mine


def test_conditions_that_are_notified() -> None:
    condition, notified = Condition(), list[int]()

    def notify() -> None:
        with condition:
            notified.append(1)
            condition.notify_all()

    with condition:
        notifier = in_thread(notify)
        assert condition.wait_for(lambda: notified, SOON)
        assert not condition.wait(0)
    notifier.result(SOON)


@pytest.mark.parametrize("how", ["notify", "notify_all"])
def test_a_notification_as_a_slice_ends_ends_the_wait(how: str) -> None:
    """It comes when the waiting thread has given up the slice, and has not got the lock yet."""
    condition: Any = Condition()
    take_back = condition._acquire_restore

    def notify() -> None:
        with condition:
            getattr(condition, how)()

    def notified_first(state: Any) -> None:
        condition._acquire_restore = take_back
        other = threading.Thread(target=notify)
        other.start()
        other.join(SOON)
        take_back(state)

    condition._acquire_restore = notified_first
    with condition:
        assert condition.wait(1.0)
        assert not condition.wait(0.01)  # it was one notification
