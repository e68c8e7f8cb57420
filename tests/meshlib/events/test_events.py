"""The events of a job: what is written is what is read, and a launcher can do both."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshlib._events.events import Abort, Leave, Query, RankEnded, RankLost, parse
from meshlib._events.log import EVENTS, LogReader, publish
from transport._errors import CollectiveMismatchError, DistBackendError, RankFailedError
from transport._store import HashStore

ALL = [
    RankLost(3, "fell", vague=True),
    RankEnded(2),
    Leave(1, {"a": (4, 77), "b": None}),
    Query("a", 5, "t"),
    Abort("a", "RankFailedError", "rank 3 fell", 3),
]


def test_events_are_read_as_they_were_written():
    store = HashStore()
    log = LogReader(store, EVENTS, parse)
    for event in ALL:
        publish(store, event)
    assert log.read(0.0) == ALL
    assert log.read(0.0) == []
    publish(store, ALL[0])
    assert log.read(0.0) == ALL[:1]
    assert LogReader(store, EVENTS, parse, len(ALL[0].line())).read(0.0) == [*ALL[1:], ALL[0]]


@pytest.mark.parametrize(
    "error",
    [CollectiveMismatchError("differs"), RankFailedError("fell", 2), DistBackendError("broke")],
    ids=lambda error: type(error).__name__,
)
def test_an_abort_is_the_same_error_on_every_rank(error):
    raised = Abort.of("group", error).exception()
    assert (type(raised), str(raised)) == (type(error), str(error))
    assert getattr(raised, "rank", None) == getattr(error, "rank", None)


def test_they_need_no_numpy():
    code = "import sys, meshlib._events.log; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
