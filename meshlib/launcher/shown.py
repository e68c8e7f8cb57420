"""What a launcher lets be seen of its job: where ``meshlib top`` finds it, and the page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from meshlib.command_line import say
from meshlib.launcher.nodes.coordinator import Placement
from meshlib.launcher.options.launch import LaunchOptions
from meshlib.monitor.jobs import Job, write
from transport.errors import DistError

if TYPE_CHECKING:
    from meshlib.monitor.server import PageServer
    from meshlib.monitor.watch import JobWatch


class Shown:
    """The launch ``run_id``, whose own ``folder`` only this user may enter. ``close`` ends it."""

    def __init__(self, options: LaunchOptions, run_id: str, folder: Path) -> None:
        self._options = options
        self._run_id = run_id
        self._folder = folder
        self._watch: JobWatch | None = None
        self._page: PageServer | None = None

    def begin(self, placement: Placement) -> None:
        """Show the ranks that are about to be started; the page is at the first node alone."""
        program = self._options.program.target
        job = Job(
            name=self._run_id,
            host=placement.store_host,
            port=placement.store_port,
            secret=placement.secret,
            program=program,
            pid=os.getpid(),
            ranks=placement.world_size,
        )
        write(self._folder, job)
        address = self._options.monitor
        if address is None or placement.node != 0 or self._page is not None:
            return
        # HTTP is not for those who launch without it.
        from meshlib.monitor.server import PageServer
        from meshlib.monitor.view import JobView
        from meshlib.monitor.watch import JobWatch

        try:
            self._watch = JobWatch(job.connect(), JobView(Path(program).name, job.ranks))
            self._page = PageServer(self._watch, *address)
        except (DistError, OSError) as error:  # a job is not to fail because nobody sees it
            self.close()
            say("meshrun", f"there is no page of this job: {error}")
            return
        self._watch.start()
        say("meshrun", f"this job can be seen at {self._page.url}")

    def close(self) -> None:
        """Stop showing."""
        if self._page is not None:
            self._page.close()
        if self._watch is not None:
            self._watch.close()
        self._page = self._watch = None
