"""A second, sleeping process that cleans up when the launcher itself is killed.

The kernel kills the ranks then (their parent-death signal); what they have started in turn, and
the launcher's temporary directory, are left to the guardian. It notices by a pipe that closes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import warnings

from meshlib.launcher.descriptors import readable
from meshlib.launcher.ranks.sweep import kill_all, strays, wait_until_gone

_ALL_WELL = b"."


class Guardian:
    """Started by ``fork`` before the launcher has threads; ends with ``dismiss``."""

    def __init__(self, run_id: str, directory: str) -> None:
        reader, self._writer = os.pipe2(os.O_CLOEXEC)
        with warnings.catch_warnings():
            # NumPy's threads may be there, of which Python warns; the child uses nothing of theirs.
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
        """End the guardian, which then touches nothing, and wait for it. Idempotent."""
        if self._writer < 0:
            return
        with contextlib.suppress(OSError):
            os.write(self._writer, _ALL_WELL)
        os.close(self._writer)
        self._writer = -1
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _guard(reader: int, run_id: str, directory: str) -> None:
    signal.set_wakeup_fd(-1)  # it is the launcher's
    os.setsid()  # Ctrl-C and a closing terminal are the launcher's business
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # whoever reads the launcher's output must see its end
        os.dup2(null, standard)
    readable(reader, None)
    if os.read(reader, 1) == _ALL_WELL:
        return
    for _ in range(10):  # until a look finds nothing: a process may have forked meanwhile
        found = strays(run_id, None)
        if not found:
            break
        kill_all(found, signal.SIGKILL)
        wait_until_gone(found, 1.0)
    shutil.rmtree(directory, ignore_errors=True)
