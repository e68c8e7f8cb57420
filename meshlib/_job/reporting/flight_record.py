"""``FlightRecord``: the files with one rank's last calls, written after a failure."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from meshlib._job.membership import JobMembership
from meshlib._job.registry import GroupRegistry
from meshlib._recording.log import RankLog
from meshlib._recording.recorder import FlightRecorder, Record
from meshlib._trace import GroupInfo
from transport import _environment as environment


class RemoteCalls(GroupInfo, Protocol):
    """The records of remote calls, dumped like those of a group."""

    workers: Sequence[str]

    def records(self) -> list[Record]:
        """Return the records, oldest first."""
        ...


class FlightRecord:
    """Writes the calls in ``recorder`` and the remote calls, if there were any."""

    def __init__(
        self,
        recorder: FlightRecorder,
        membership: JobMembership,
        registry: GroupRegistry,
        log: RankLog,
    ) -> None:
        self.remote_calls: RemoteCalls | None = None
        self.trouble: str | None = None
        """The first failure of this rank, if any."""
        self._recorder = recorder
        self._membership = membership
        self._registry = registry
        self._log = log
        self._writing = threading.Lock()

    def note_failure(self, failure: str) -> None:
        """Write the record if ``failure`` is the first and the launcher has set a directory."""
        if self.trouble is None:
            self.trouble = failure
            self.write_if_requested()

    def write(self, directory: str | Path) -> Path:
        """Write the record into ``directory`` and return the file's path.

        ``meshlib trace DIRECTORY`` merges the ranks' files. Raises OSError.
        """
        from meshlib._trace.dump import RankDump  # most jobs write no record

        records, workers = self._recorder.records(), ()
        groups = [*self._registry.all()]
        remote = self.remote_calls
        if remote is not None:
            records += remote.records()
            groups, workers = [*groups, remote], remote.workers
        membership = self._membership
        rank, size = membership.rank, membership.epoch.size
        return RankDump.of(rank, size, records, groups, self.trouble, workers).write(directory)

    def write_if_requested(self) -> None:
        """Write the record if the launcher has set a directory."""
        directory = os.environ.get(environment.TRACE_DIR)
        if directory:
            try:
                # The watcher and the rank's own thread may both write; the last record stays.
                with self._writing:
                    self.write(directory)
            except OSError as error:
                self._log.warning("the flight record was not written: %s", error)

    def end_in_a_fork(self) -> None:
        """Make this usable in a fork of the rank's process."""
        self._writing = threading.Lock()  # a thread that the fork lacks may have held it
