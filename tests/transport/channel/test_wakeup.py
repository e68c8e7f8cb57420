"""A wakeup after the end reaches no other file."""

import math
import select
import socket

import pytest

from meshlib.rpc._overdue.timer import TimerThread
from transport._channel.threads import ThreadPool


def timer():
    timer = TimerThread("over")
    timer.start(lambda: math.inf)
    return timer


@pytest.mark.parametrize(
    "make", [lambda: ThreadPool("over", 1, lambda: None, lambda error: None), timer]
)
def test_a_wakeup_after_the_end_reaches_no_other_file(make):
    """As by an ``__del__``: the descriptors are by then those of other files."""
    woken = make()
    woken.close()
    pairs = [socket.socketpair() for _ in range(8)]
    ends = [end for pair in pairs for end in pair]
    try:
        woken.notify()
        written, _, _ = select.select(ends, [], [], 0)
        assert written == []
    finally:
        for end in ends:
            end.close()
