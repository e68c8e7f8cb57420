"""Work and Future: outcomes, waits, callbacks."""

import gc
import threading
import weakref
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest

from meshlib._calls.future import Future, WaitTimeoutError
from meshlib._calls.work import ReceivedMessage, Work, WorkResult, fail, finish
from transport._errors import DistBackendError


def test_a_future_gives_its_value_to_every_waiter():
    future, got = Future(), []
    threads = [
        threading.Thread(target=lambda: got.append(future.wait(60)), daemon=True) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert not future.done()
    future.set_result(5)
    for thread in threads:
        thread.join(60)
    assert got == [5] * 4
    assert future.value() == 5


def test_then_chains_values_and_errors():
    future = Future()
    doubled = future.then(lambda f: f.value() * 2)
    broken = doubled.then(lambda f: f.value() / 0)
    future.set_result(4)
    assert doubled.wait(60) == 8
    with pytest.raises(ZeroDivisionError):
        broken.wait(60)
    assert isinstance(broken.exception(), ZeroDivisionError)
    assert future.then(lambda f: f.value() + 1).value() == 5


def test_an_outcome_is_set_once_and_asked_for_when_it_is_there():
    future = Future()
    with pytest.raises(RuntimeError, match="not done"):
        future.value()
    future.set_exception(KeyError("k"))
    with pytest.raises(RuntimeError, match="outcome already"):
        future.set_result(1)
    with pytest.raises(KeyError):
        future.value()


def test_work_tells_how_it_stands():
    work = Work(lambda: "call #1")
    assert not work.is_completed()
    assert not work.is_success()
    with pytest.raises(WaitTimeoutError, match=r"call #1 is not done after 0\.01 s"):
        work.wait(0.01)
    finish(work, "result")
    assert work.wait()
    assert work.is_success()
    assert work.exception() is None
    assert work.result() == "result"
    with pytest.raises(ValueError, match="only a receive"):
        work.source_rank()


def test_work_raises_what_the_call_raised():
    work = Work(lambda: "call #2")
    fail(work, OSError("gone"))
    assert work.is_completed()
    assert not work.is_success()
    for call in (work.wait, work.result, work.source_rank, work.get_future().wait):
        with pytest.raises(OSError, match="gone"):
            call()


def failed_work():
    work = Work(lambda: "call #3")
    fail(work, OSError("gone"))
    return work


@pytest.mark.parametrize(
    "wait",
    [lambda: failed_work().wait(), lambda: failed_work().get_future().wait()],
    ids=["work", "future"],
)
def test_what_a_caller_held_is_gone_with_the_exception(wait):
    """At once, not when the collector comes: it may be a large array, or a remote reference."""

    def caller(_held):
        wait()

    held = np.ones(3)
    gone = weakref.ref(held)
    gc.disable()
    try:
        with suppress(OSError):
            caller(held)
        del held
        assert gone() is None
    finally:
        gc.enable()


def test_a_receive_has_a_source():
    work = Work(lambda: "recv")
    finish(work, ReceivedMessage("data", 3))
    assert work.source_rank() == 3
    assert work.result() == "data"


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (None, "SUCCESS"),
        (TimeoutError("late"), "TIMEOUT"),
        (DistBackendError("broken"), "COMM_ERROR"),
        (KeyError("k"), "UNKNOWN"),
    ],
)
def test_how_a_call_ended_as_a_number(error, result):
    work = Work(lambda: "call #3")
    future = work.get_future_result()
    if error is None:
        finish(work, 1)
    else:
        fail(work, error)
    assert future.wait(60) is WorkResult[result]


def test_a_wait_of_0_has_no_bound():
    work = Work(lambda: "call #4")
    timer = threading.Timer(0.1, finish, [work, None])
    timer.start()
    assert work.wait(timedelta(0))
    timer.join(60)
