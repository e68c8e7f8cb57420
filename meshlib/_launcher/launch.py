"""One launch on one node, from its options to its exit code; it leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshlib._command_line import print_note
from meshlib._launcher.options.launch import LaunchOptions
from meshlib._launcher.ranks.starting import start_server
from meshlib._launcher.signals import SignalPipe
from transport._errors import DistError

if TYPE_CHECKING:
    from meshlib._launcher.ranks.placement import NodePlacement


def launch(options: LaunchOptions, control: int | None = None) -> int:
    """Run the job described by ``options``; return the exit code for the shell.

    Call it from the main thread of a separate process. A controlling process writes to the
    descriptor ``control``; see ``SignalPipe``.
    """
    for note in options.warnings:
        print_note("meshrun", note)
    # From here on the agent handles Ctrl-C and ends what was started.
    with SignalPipe(control) as signals:
        try:
            return _launch(options, signals)
        except (DistError, OSError) as error:
            print_note("meshrun", f"{error}{_advice(error, options)}")
            return 1


def _launch(options: LaunchOptions, signals: SignalPipe) -> int:
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"
    with contextlib.ExitStack() as made:
        # Started first, because the ranks wait for its imports.
        server = start_server(options, run_id)
        if server is not None:
            made.callback(server.close)
        # Meanwhile this process imports what it needs.
        import shutil

        from meshlib._launcher.folder import make_folder, remove_abandoned_folders
        from meshlib._launcher.ranks.sweep import Guardian, children
        from meshlib._monitor.jobs import FOLDERS
        from transport._platform import adopt_orphans

        strangers = children(os.getpid())  # children of a shell that became this process by exec
        remove_abandoned_folders(FOLDERS)
        temporary = make_folder(FOLDERS)
        directory = temporary
        if options.output.log_dir is not None:
            directory = options.output.log_dir / run_id
            if options.trace_dir is None:
                options = replace(options, trace_dir=directory / "trace")
        # Forked before any thread exists.
        guardian = Guardian(run_id, str(temporary))
        made.callback(guardian.dismiss)
        made.callback(shutil.rmtree, temporary, ignore_errors=True)
        adopt_orphans()
        from meshlib._launcher.agent import Agent
        from meshlib._launcher.nodes.coordinator import AgentLog, Coordinator, OwnLog

        log: AgentLog
        if options.nodes.etcd:
            from meshlib._launcher.nodes.etcd_log import EtcdLog

            log = EtcdLog(options, run_id, signals.knock)
        elif options.nodes.many:
            from meshlib._launcher.nodes.agents_log import SharedLog

            log = SharedLog(options, run_id, signals.knock)
        else:
            log = OwnLog(options, run_id)
        coordinator = Coordinator(options, run_id, log)
        made.callback(coordinator.close)
        listing = _JobListing(options, run_id, temporary, made)
        spare = {guardian.pid, *strangers}
        return Agent(
            options, coordinator, signals, run_id, directory, spare, listing.begin, server
        ).run()


def _advice(error: Exception, options: LaunchOptions) -> str:
    from transport._net.sockets import is_in_use

    if not is_in_use(error):
        return ""
    if options.nodes.many:
        return "; set another port with --master-port on all nodes"
    return "; choose another port with --master-port, or leave it out to use any free port"


class _JobListing:
    """Makes the launch ``run_id`` visible to ``meshlib top``, and serves its page.

    ``meshlib top`` finds ``folder``, which only this user can read. Ends when ``made`` is closed.
    """

    def __init__(
        self, options: LaunchOptions, run_id: str, folder: Path, made: contextlib.ExitStack
    ) -> None:
        self._options = options
        self._run_id = run_id
        self._folder = folder
        self._made = made
        self._has_page = False

    def begin(self, placement: NodePlacement) -> None:
        """List the ranks that are about to be started; only the first node serves the page."""
        from meshlib._monitor.jobs import RunningJob, write

        program = self._options.program.target
        job = RunningJob(
            name=self._run_id,
            host=placement.store_host,
            port=placement.store_port,
            secret=placement.secret,
            program=program,
            pid=os.getpid(),
            ranks=placement.world_size,
            url=placement.store_url,
        )
        write(self._folder, job)
        address = self._options.monitor
        if address is None or placement.node != 0 or self._has_page:
            return
        # Most launches need no HTTP.
        from meshlib._monitor.server import PageServer
        from meshlib._monitor.view import JobView
        from meshlib._monitor.watch import JobWatch

        try:
            watch = JobWatch(job.connect(), JobView(Path(program).name, job.ranks))
            self._made.callback(watch.close)
            page = PageServer(watch, *address)
        except (DistError, OSError) as error:  # the job must not fail without its page
            print_note("meshrun", f"the page of this job cannot be served: {error}")
            return
        self._made.callback(page.close)
        self._has_page = True
        watch.start()
        print_note("meshrun", f"this job can be seen at {page.url}")
