"""``should_stop`` and ``request_stop``: all ranks stop at the same step before a job ends early."""

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
    """Return whether to stop at ``step``, after any rank was asked to stop.

    Every rank calls it once in each step of its loop, with increasing step numbers, at least 0.
    From the first call in the main thread until the end of the job, SIGTERM or SIGUSR1 to any rank
    asks all ranks to stop. A program that handles the signal itself keeps its handler (see
    ``request_stop``). All ranks then get True at the same step, the earliest that no rank has
    passed, and at all later steps.

    No message is sent until a signal arrives. Then the call waits for the current step of every
    rank that is not lost or gone; the other ranks' watchers answer without a call there.

    Raises TypeError or ValueError for an invalid step, ``DistStoreError`` if the job's store is
    lost meanwhile, ``DistBackendError`` if a rank does not answer within the job's timeout.
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
    """Make the next ``should_stop`` of this rank ask all ranks to stop.

    For programs with their own signal handler, which may call this, and for other reasons to stop,
    such as a time limit or a file. Thread-safe. Raises TypeError unless ``reason`` is a str.
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
    """Handlers that forward ``SIGNALS`` to ``agreement``; they replace only the default action.

    Does nothing outside the main thread. Handlers raise nothing and take no lock: they may run in
    any frame of the library.
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
        """Restore the default action, unless the program has set another handler meanwhile."""
        if _in_main_thread():
            for number in self._installed:
                if signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_DFL)

    def _note(self, number: int, _: FrameType | None) -> Any:
        self._agreement.request(signal.Signals(number).name)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
