"""``Interrupter``: when a member's epoch is over, its calls are, too."""

from __future__ import annotations

import threading

from meshlib import DistError, ProcessGroup
from meshlib.extend import Job, fail, is_idle, is_usable, on_failure

_PAUSE_SECONDS = 0.01


class Interrupter:
    """Ends the calls of this rank, on whatever group, once the group ``members`` has broken.

    A rank may be in a call with others that have lost nobody, on a group of their own, while some
    of those have left the step and will not come. Works until ``end``, when the rank itself has
    left the step; groups without a call under way stay whole.
    """

    def __init__(self, job: Job, members: ProcessGroup) -> None:
        self._job = job
        self._members = members
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        on_failure(members, self._begin)

    def end(self) -> None:
        """Stop; nothing is ended any more when this returns."""
        with self._lock:
            self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, error: DistError) -> None:
        with self._lock:
            if self._over.is_set() or self._thread is not None:
                return
            if not any(is_usable(group) for group in self._job.groups()):
                return
            self._thread = threading.Thread(
                target=self._run, args=(error,), name="meshlib-interrupter", daemon=True
            )
            self._thread.start()

    def _run(self, error: DistError) -> None:
        while True:
            for group in self._job.groups():
                if is_usable(group) and not is_idle(group):
                    fail(group, error)
            if self._over.wait(_PAUSE_SECONDS):
                return
