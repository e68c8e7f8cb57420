"""``should_stop`` and ``request_stop``: before a job ends early, all ranks save together."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from meshlib._job.current import current_world
from meshlib._job.stopping import StopAgreement
from meshlib._job.world import World
from transport._checks import to_whole_number

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals by which engines and launchers announce the end of a job."""


def should_stop(step: int) -> bool:
    """Return whether to stop at ``step``: the same on all ranks, once one of them was told to end.

    Every rank calls it once in each step of its loop, with the step's number, at least 0 and
    growing. From the first call in the main thread until the end of the job, SIGTERM or SIGUSR1 to
    any rank asks all ranks to stop. A program that handles that signal itself keeps its handler
    (see ``request_stop``). All ranks then get True at the same step: the earliest that none
    has passed. Later calls return True, too.

    Costs no message until a signal comes. Then it waits until every rank has said its step, which
    needs no call there; ranks that are lost or have left are not waited for.

    Raises TypeError and ValueError for a wrong step, ``DistStoreError`` if the job's store is lost
    meanwhile, ``DistBackendError`` if a rank does not answer within the job's timeout.
    """
    number = to_whole_number(step, "step")
    if number < 0:
        raise ValueError(f"step must be at least 0, got {number}")
    world = _world()
    if world.stopping_signals is None:
        world.stopping_signals = StopSignals(world.stopping)
        world.on_close(world.stopping_signals.restore)
    return world.stopping.should_stop(number)


def request_stop(reason: str = "request_stop()") -> None:
    """Have the next ``should_stop`` of this rank ask all ranks to stop.

    For a program with a signal handler of its own, which may call this, and for other reasons to
    stop: a time limit, a file. Thread-safe. Raises TypeError unless ``reason`` is a str.
    """
    if not isinstance(reason, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"reason must be a str, got {reason!r}")
    _world().stopping.request(reason)


def _world() -> World:
    world = current_world()
    if world.refusal is not None:
        raise world.refusal
    return world


class StopSignals:
    """Handlers that pass ``SIGNALS`` on to ``agreement``, in the place of the default action only.

    Does nothing outside of the main thread. Handlers raise nothing and take no lock: they may run
    in any frame of the library.
    """

    def __init__(self, agreement: StopAgreement) -> None:
        self._agreement = agreement
        self._installed: list[signal.Signals] = []
        if _in_main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._note)
                    self._installed.append(number)

    def restore(self) -> None:
        """Put the default action back, unless the program has set a handler since."""
        if _in_main_thread():
            for number in self._installed:
                if signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_DFL)

    def _note(self, number: int, _: FrameType | None) -> Any:
        self._agreement.request(signal.Signals(number).name)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
