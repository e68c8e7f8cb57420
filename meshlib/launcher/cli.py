"""``meshrun``, which is also ``meshlib run``."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshlib.launcher.agent import Agent
from meshlib.launcher.arguments import parse
from meshlib.launcher.coordinator import Coordinator
from meshlib.launcher.guardian import Guardian
from meshlib.launcher.one_node import OneNode
from meshlib.launcher.options import LaunchOptions
from meshlib.launcher.signals import SignalPipe
from meshlib.launcher.sweep import adopt_orphans, children
from transport.errors import DistError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that ``argv`` (default: the process's arguments) describes.

    Returns the exit code for the shell: 0, the first failing rank's (128 + n for signal n), or
    130 and 143 after Ctrl-C and SIGTERM. Call it from the main thread of a process of its own.
    """
    return launch(parse(argv))


def launch(options: LaunchOptions) -> int:
    """Run the job that ``options`` describe; see ``main``."""
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"
    strangers = children(os.getpid())  # of a shell that became this process by exec
    temporary = Path(tempfile.mkdtemp(prefix="meshrun-"))
    directory = temporary
    if options.output.log_dir is not None:
        directory = options.output.log_dir / run_id
        if options.trace_dir is None:
            options = replace(options, trace_dir=directory / "trace")
    # Order matters: the guardian is forked while there is no thread, and dismissed last.
    guardian = Guardian(run_id, str(temporary))
    adopt_orphans()
    try:
        with SignalPipe() as signals:
            coordinator = _coordinator(options, run_id, signals)
            try:
                spare = frozenset({guardian.pid, *strangers})
                agent = Agent(options, coordinator, signals, run_id, directory, spare)
                return agent.run()
            finally:
                coordinator.close()
    except (DistError, OSError) as error:
        sys.stderr.write(f"meshrun: {error}\n")
        return 1
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        guardian.dismiss()


def _coordinator(options: LaunchOptions, run_id: str, signals: SignalPipe) -> Coordinator:
    nodes = options.nodes
    if not nodes.many:
        return OneNode(options.ranks, options.max_restarts, nodes.port)
    from meshlib.launcher.many_nodes import ManyNodes  # one node does not pay for it

    return ManyNodes(nodes, options.ranks, options.max_restarts, run_id, signals.knock)


if __name__ == "__main__":
    sys.exit(main())
