"""Ends the processes that ranks have started, even if the launcher is killed.

In that case the kernel kills the ranks by their parent-death signal. The guardian, a second,
sleeping process, kills the processes that they started and removes the launcher's folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
import warnings
from collections.abc import Iterable

from meshlib._launcher.signals import readable
from transport import _environment as environment
from transport._platform import environment_of, wait_for_end
from transport._platform import parents as all_parents

_GRACE_SECONDS = 0.5


def strays(run_id: str, adopter: int | None) -> list[int]:
    """Return the processes of the launch ``run_id``, and all their descendants.

    Their initial environment contains ``run_id``, in whatever session or process group they are.
    The children of ``adopter`` are included even without it.
    """
    mark = f"{environment.RUN_ID}={run_id}".encode()
    parents = all_parents()
    found = more = {
        pid for pid, parent in parents.items() if parent == adopter or mark in environment_of(pid)
    }
    while more:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
    return sorted(found - {os.getpid()})


def children(parent: int) -> list[int]:
    """Return the children of process ``parent``."""
    return [pid for pid, its_parent in all_parents().items() if its_parent == parent]


def end_strays(run_id: str, spare: Iterable[int]) -> list[int]:
    """End this process's adopted children and all processes of ``run_id``; return their ids.

    They get half a second to end by themselves, as multiprocessing's resource tracker does, the
    same time after SIGTERM, and then SIGKILL.
    """
    left_alone = set(spare)

    def find() -> list[int]:
        return [pid for pid in strays(run_id, os.getpid()) if pid not in left_alone]

    found = find()
    seen: set[int] = set(found)
    for number in (None, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        if not found:
            break
        if number is not None:
            kill_all(found, number)
        wait_until_gone(found, _GRACE_SECONDS)
        reap(found)
        found = find()
        seen.update(found)
    return sorted(seen)


def kill_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send ``number`` to each existing process in ``pids``."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def wait_until_gone(pids: Iterable[int], timeout: float) -> bool:
    """Wait until all processes in ``pids`` have ended; return False after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    return all(wait_for_end(pid, end - time.monotonic()) for pid in pids)


def reap(pids: Iterable[int]) -> None:
    """Collect the ended children of this process among ``pids``."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


_DISMISSED = b"."


class Guardian:
    """The guardian process, which is forked before the launcher has threads."""

    def __init__(self, run_id: str, directory: str) -> None:
        reader, self._writer = os.pipe()
        with warnings.catch_warnings():
            # Python warns about NumPy's threads; the child does not depend on them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid: int = os.fork()
        if self.pid == 0:
            try:
                os.close(self._writer)
                _guard(reader, run_id, directory)
            finally:
                os._exit(0)
        os.close(reader)

    def dismiss(self) -> None:
        """End the guardian without cleaning up, and wait for it. Idempotent."""
        if self._writer < 0:
            return
        with contextlib.suppress(OSError):
            os.write(self._writer, _DISMISSED)
        os.close(self._writer)
        self._writer = -1
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _guard(reader: int, run_id: str, directory: str) -> None:
    signal.set_wakeup_fd(-1)  # the descriptor belongs to the launcher
    os.setsid()  # the launcher handles Ctrl-C and a closing terminal
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # readers of the launcher's output must get its end
        os.dup2(null, standard)
    readable(None, reader)
    if os.read(reader, 1) == _DISMISSED:
        return
    for _ in range(10):  # repeat, because a process may have forked meanwhile
        found = strays(run_id, None)
        if not found:
            break
        kill_all(found, signal.SIGKILL)
        wait_until_gone(found, 1.0)
    shutil.rmtree(directory, ignore_errors=True)
