"""A hostile scheduler: stops threads and processes for up to two seconds, at random points.

``python -m pytest -p tests.hostile --timeout 300 tests/meshlib/rpc`` shows which tests, and what in
the library, relies on timing. Threads of the tests' process are stopped where they call something,
which hits short tests as well as long ones, and most often in the tests' own code: between two
calls of a group, say, whose order nothing fixes. The processes that they start, and their own, are
stopped from outside (SIGSTOP). ``--pauses SEED`` chooses other points; a test gets the same ones
when it is run alone, as far as its threads do the same. A failed test's report lists its pauses.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

LONGEST = 2.0
# Seconds for which a test's threads are stopped altogether, in the tests' own code too, and the one
# that starts the others.
BUDGET, OWN_BUDGET, MAIN_BUDGET = 8.0, 4.0, 1.0
_TESTS = str(Path(__file__).resolve().parent)
_CODE = str(Path(__file__).resolve().parents[1])
_SKIPPED = (f"{_CODE}/.", __file__)  # an environment inside the checkout


class _Points:
    """Chooses the calls to stop in some code: a few early, then more and more rarely."""

    def __init__(self, draw: random.Random, within: float, growth: float, budget: float) -> None:
        self._random, self._within, self._growth = draw, within, growth
        self.budget = budget
        self._left = 0
        self.draw()

    def draw(self) -> None:
        self._left = int(self._within ** self._random.random())
        self._within *= self._growth

    def reached(self) -> bool:
        """Count a call: is this where to stop?"""
        self._left -= 1
        return self._left <= 0 and self.budget > 0


class Pauses:
    """Stops threads of this process, for times that are drawn."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._begun = time.monotonic()
        self._anywhere = _Points(self._random, 100.0, 1.5, BUDGET)
        self._in_tests = _Points(self._random, 8.0, 1.2, OWN_BUDGET)
        self._main_budget = MAIN_BUDGET
        self.made: list[str] = []

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Count what threads call and return from: ``sys.setprofile`` calls this."""
        name = frame.f_code.co_filename
        points = self._in_tests if name.startswith(_TESTS) else self._anywhere
        if not points.reached():
            return
        ours = name.startswith(_CODE) and not name.startswith(_SKIPPED)
        if not ours or threading.active_count() < 2:
            return
        seconds = 0.01 * (LONGEST / 0.01) ** self._random.random()
        if threading.current_thread() is threading.main_thread():
            if seconds > self._main_budget:
                return
            self._main_budget -= seconds
        points.draw()
        points.budget -= seconds
        place = f"{os.path.relpath(name, _CODE)}:{frame.f_lineno} {frame.f_code.co_name} ({event})"
        now = time.monotonic() - self._begun
        self.made.append(f"{now:6.2f} s: {seconds:.2f} s {threading.current_thread().name} {place}")
        time.sleep(seconds)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pauses", default="1", help="seed of tests.hostile's pauses")


def pytest_report_header(config: pytest.Config) -> str:
    return f"hostile scheduler: --pauses {config.getoption('pauses')}"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # the workers have the tests
    command = [sys.executable, __file__, str(os.getpid()), str(config.getoption("pauses"))]
    stopper = subprocess.Popen(command, stdin=subprocess.PIPE)

    def end() -> None:
        stopper.communicate()  # the end of its input is the end

    config.add_cleanup(end)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    pauses = Pauses(f"{item.config.getoption('pauses')} {item.nodeid}")
    item.stash[_KEY] = pauses
    threading.setprofile(pauses.profile)
    sys.setprofile(pauses.profile)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


_KEY = pytest.StashKey[Pauses]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        report.sections.append(("threads that were stopped", "\n".join(item.stash[_KEY].made)))
    return report


def _processes_of(pid: int) -> list[int]:
    """Return ``pid`` and what it has started, and so on, without those that are stopped."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, parent = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "TZ":
                parents[int(name)] = int(parent)
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    found.remove(os.getpid())
    return found


def _stop_processes(pid: int, seed: str) -> None:
    """Stop ``pid`` or one of its descendants, again and again, until standard input ends."""
    draw = random.Random(seed)
    os.set_blocking(0, False)
    while os.getppid() == pid and sys.stdin.buffer.read(1) is None:
        time.sleep(0.02 * 50 ** draw.random())
        chosen = draw.choice(_processes_of(pid))
        if chosen == pid and draw.random() < 0.7:
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(chosen, signal.SIGSTOP)
            time.sleep(0.01 * (LONGEST / 0.01) ** draw.random())
            os.kill(chosen, signal.SIGCONT)


if __name__ == "__main__":
    _stop_processes(int(sys.argv[1]), sys.argv[2])
