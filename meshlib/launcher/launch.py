"""One launch on one node, from its options to its exit code. What it has made is gone then."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from meshlib.command_line import say
from meshlib.launcher.agent import Agent
from meshlib.launcher.nodes.coordinator import Coordinator, OneNode
from meshlib.launcher.options.launch import LaunchOptions
from meshlib.launcher.ranks.sweep import Guardian, adopt_orphans, children
from meshlib.launcher.ranks.workers import start_server
from meshlib.launcher.shown import Shown
from meshlib.launcher.signals import SignalPipe
from meshlib.monitor.jobs import FOLDERS
from transport.errors import DistError
from transport.net.sockets import is_in_use


def launch(options: LaunchOptions) -> int:
    """Run the job that ``options`` describe, and return the exit code for the shell.

    Call it from the main thread of a process of its own.
    """
    for note in options.warnings:
        say("meshrun", note)
    with SignalPipe() as signals:  # from here on Ctrl-C is the agent's, who ends what was begun
        return _launch(options, signals)


def _launch(options: LaunchOptions, signals: SignalPipe) -> int:
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"
    strangers = children(os.getpid())  # of a shell that became this process by exec
    temporary = Path(tempfile.mkdtemp(prefix=FOLDERS))
    directory = temporary
    if options.output.log_dir is not None:
        directory = options.output.log_dir / run_id
        if options.trace_dir is None:
            options = replace(options, trace_dir=directory / "trace")
    # Order matters: the guardian is forked while there is no thread, and dismissed last.
    guardian = Guardian(run_id, str(temporary))
    adopt_orphans()
    try:
        server = start_server(options, run_id)
        try:
            coordinator = _coordinator(options, run_id, signals)
            try:
                spare = {guardian.pid, *strangers}
                shown = Shown(options, run_id, temporary)
                agent = Agent(
                    options, coordinator, signals, run_id, directory, spare, shown, server
                )
                try:
                    return agent.run()
                finally:
                    shown.close()
            finally:
                coordinator.close()
        finally:
            if server is not None:
                server.close()
    except (DistError, OSError) as error:
        say("meshrun", f"{error}{_mend(error, options)}")
        return 1
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        guardian.dismiss()


def _mend(error: Exception, options: LaunchOptions) -> str:
    if not is_in_use(error):
        return ""
    if options.nodes.many:
        return "; give all nodes another one with --master-port"
    return "; choose another one with --master-port, or leave it out to have any that is free"


def _coordinator(options: LaunchOptions, run_id: str, signals: SignalPipe) -> Coordinator:
    nodes = options.nodes
    continues = options.on_failure == "continue"
    if not nodes.many:
        return OneNode(options.ranks, options.max_restarts, nodes.port, continues=continues)
    from meshlib.launcher.nodes.many_nodes import ManyNodes  # one node does not pay for it

    return ManyNodes(
        nodes, options.ranks, options.max_restarts, run_id, signals.knock, continues=continues
    )
