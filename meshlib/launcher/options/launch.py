"""What a launch is asked to do, checked. ``arguments`` makes it from a command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from meshlib.launcher.options.output import OutputOptions

FAILURE_GRACE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL when a rank has failed, or after Ctrl-C."""
SIGNAL_GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL when the launcher itself was told to end: ranks may be saving."""
SLURM_GRACE_SECONDS = 25.0
"""The same under Slurm, which kills everything KillWait (30 s) after its own SIGTERM."""


@dataclass(frozen=True, slots=True)
class Program:
    """What each rank runs: a Python script, a module (``-m``), anything executable; or, for
    ``spawn``, a function.
    """

    kind: Literal["script", "module", "program", "function"]
    target: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How many nodes there are, and where they meet. Times are in seconds.

    ``rank`` is None where it is assigned by arrival; ``is_host``: whether this node serves the
    store, 1 or 0, -1 where its address tells.
    """

    least: int = 1
    most: int = 1
    rank: int | None = None
    host: str = "127.0.0.1"
    port: int = 0
    job: str = "none"
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    heartbeat_timeout: float = 10.0
    is_host: float = -1.0
    local_address: str | None = None
    secret: str | None = None

    @property
    def many(self) -> bool:
        """Whether there may be more than one node."""
        return self.most > 1


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """One launch on one node. Times are in seconds.

    ``failure_grace`` is what other ranks get between SIGTERM and SIGKILL when one has failed;
    ``signal_grace`` what all get when the launcher itself is told to end. ``engine_signals``: what
    signals the launcher has signalled its ranks too. ``notes`` say where options come from that
    were not on the command line; ``warnings`` what the user is told before anything starts.
    ``on_failure``: whether the other ranks are ended when one has failed, or go on; then so many as
    ``replace`` says are replaced, and ``spares`` are ranks beyond the job's that wait for a place.
    ``start``: whether ranks are forked from one process that has imported for them, or each begins
    with ``exec``. ``monitor``: the host and the port (0: any) of the job's page, if there is to be
    one.
    """

    program: Program
    ranks: int
    start: Literal["fork", "exec"] = "exec"
    mesh: str | None = None
    nodes: NodeOptions = field(default_factory=NodeOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    trace_dir: Path | None = None
    monitor: tuple[str, int] | None = None
    max_restarts: int = 0
    on_failure: Literal["stop", "continue"] = "stop"
    replace: int = 0
    spares: int = 0
    failure_grace: float = FAILURE_GRACE_SECONDS
    signal_grace: float = SIGNAL_GRACE_SECONDS
    verbose: bool = False
    engine_signals: bool = False
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def continues(self) -> bool:
        """Whether ranks go on when others are lost."""
        return self.on_failure == "continue"
