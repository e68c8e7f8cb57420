"""One launch on one node, from its options to its exit code. What it has made is gone then."""

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
    """Run the job that ``options`` describe, and return the exit code for the shell.

    Call it from the main thread of a process of its own. A process that controls this one writes
    to the descriptor ``control``; see ``SignalPipe``.
    """
    for note in options.warnings:
        print_note("meshrun", note)
    # From here on Ctrl-C is the agent's, who ends what was begun.
    with SignalPipe(control) as signals:
        try:
            return _launch(options, signals)
        except (DistError, OSError) as error:
            print_note("meshrun", f"{error}{_mend(error, options)}")
            return 1


def _launch(options: LaunchOptions, signals: SignalPipe) -> int:
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"
    with contextlib.ExitStack() as made:
        # First of all, because the ranks wait for it: it imports what they need.
        server = start_server(options, run_id)
        if server is not None:
            made.callback(server.close)
        # Meanwhile come what this process needs.
        import shutil

        from meshlib._launcher.folder import make_folder, remove_abandoned_folders
        from meshlib._launcher.ranks.sweep import Guardian, children
        from meshlib._monitor.jobs import FOLDERS
        from transport._platform import adopt_orphans

        strangers = children(os.getpid())  # of a shell that became this process by exec
        remove_abandoned_folders(FOLDERS)
        temporary = make_folder(FOLDERS)
        directory = temporary
        if options.output.log_dir is not None:
            directory = options.output.log_dir / run_id
            if options.trace_dir is None:
                options = replace(options, trace_dir=directory / "trace")
        # The guardian is forked while there is no thread.
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
        shown = _Shown(options, run_id, temporary, made)
        spare = {guardian.pid, *strangers}
        return Agent(
            options, coordinator, signals, run_id, directory, spare, shown.begin, server
        ).run()


def _mend(error: Exception, options: LaunchOptions) -> str:
    from transport._net.sockets import is_in_use

    if not is_in_use(error):
        return ""
    if options.nodes.many:
        return "; give all nodes another one with --master-port"
    return "; choose another one with --master-port, or leave it out to have any that is free"


class _Shown:
    """Lets ``meshlib top`` find the launch ``run_id``, by its ``folder``, which only this user may
    enter; and serves its page, until ``made`` is closed.
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
        """Show the ranks that are about to be started; the page is at the first node alone."""
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
        # HTTP is not for those who launch without it.
        from meshlib._monitor.server import PageServer
        from meshlib._monitor.view import JobView
        from meshlib._monitor.watch import JobWatch

        try:
            watch = JobWatch(job.connect(), JobView(Path(program).name, job.ranks))
            self._made.callback(watch.close)
            page = PageServer(watch, *address)
        except (DistError, OSError) as error:  # a job is not to fail because nobody sees it
            print_note("meshrun", f"there is no page of this job: {error}")
            return
        self._made.callback(page.close)
        self._has_page = True
        watch.start()
        print_note("meshrun", f"this job can be seen at {page.url}")
