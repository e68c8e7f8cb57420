"""The meshrun that starts the ranks of ``local_ranks``, and ends them with the notebook."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from meshlib._launcher import controlled
from meshlib._monitor.jobs import RunningJob, running
from meshlib.notebook._functions import require_cloudpickle
from meshlib.notebook._output import EventQueue, LauncherEnded, Marked, OutputReader, Printed
from transport._errors import DistStoreError

_END_SECONDS = 5.0


class LocalLauncher:
    """A meshrun for ``ranks``, a number or a mesh; their output goes to ``events``."""

    def __init__(self, ranks: int | str, events: EventQueue) -> None:
        require_cloudpickle()
        count = ["--mesh", ranks] if isinstance(ranks, str) else ["-n", str(ranks)]
        arguments = [*count, "--standalone", "--prefix", "--grace-period", "1"]
        order = controlled.LaunchOrder([*arguments, "-m", "meshlib.notebook"], os.getcwd())
        pipe = subprocess.PIPE
        self._events = events
        self._process = controlled.start(controlled.command(), order, stdout=pipe, stderr=pipe)
        self._reader = OutputReader(self._process, events)

    def begin(self, timeout: float) -> RunningJob:
        """Wait until the first rank has joined the job; return the job.

        Raises ``DistStoreError`` with the output if meshrun ends or ``timeout`` seconds pass.
        """
        until = time.monotonic() + timeout
        printed: list[str] = []
        while True:
            match self._events.next(until):
                case Marked(_, _, 0):
                    break
                case Printed(text=text):
                    printed.append(text)
                case LauncherEnded():
                    raise DistStoreError(f"the ranks ended at once:\n{''.join(printed)}")
                case None:
                    raise DistStoreError(
                        f"the ranks have not started after {timeout:g} s\n{''.join(printed)}"
                    )
                case _:
                    pass
        return next(job for job in running() if job.pid == self._process.pid)

    def close(self, timeout: float) -> None:
        """Wait ``timeout`` seconds for the ranks to end, then end them. Idempotent."""
        if not self._wait(timeout):
            controlled.send(self._process, signal.SIGINT)
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not self._wait(_END_SECONDS):
            self._process.kill()
            self._process.wait()
        self._events.close()
        self._reader.join()

    def _wait(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True
