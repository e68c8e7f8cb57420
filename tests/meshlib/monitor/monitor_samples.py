"""Samples as ranks would post them."""

from meshlib._diagnosis.sampling.sample import Coordinate, Sample, StepTime, Traffic
from meshlib._recording.call_report import CallReport
from meshlib._recording.recorder import COLLECTIVE
from transport._calls.header import NO_ROOT, CallHeader, Kind

TAKEN = 1000.0


def sample(rank, number=1, *, inside=0.5, size=4, **other):
    """Return a sample of one second on a mesh of dp=2, tp=2 with a group of all and one of "dp"."""
    values = {
        "rank": rank,
        "number": number,
        "taken": TAKEN,
        "host": "here",
        "pid": 100 + rank,
        "epoch": 0,
        "place": rank,
        "size": size,
        "seconds": 1.0,
        "inside": inside,
        "total": 10 * number,
        "step": StepTime(0.1, -1),
        "mesh": [Coordinate("dp", rank // 2, 2), Coordinate("tp", rank % 2, 2)],
        "traffic": [Traffic("all", "default", 10, 80, 0.0), Traffic("d", "dp", 5, 1000, inside)],
        "open_calls": [],
    }
    return Sample(**values | other)


def open_call(seconds, waiting_for=None, *, blocking=True):
    return CallReport(
        "d",
        CallHeader(7, 0, NO_ROOT, Kind.ALL_REDUCE, 0, 0),
        COLLECTIVE,
        8,
        "train.py:3 in f",
        blocking=blocking,
        issued=TAKEN - seconds,
        started=TAKEN - seconds,
        waiting_for=waiting_for,
    )
