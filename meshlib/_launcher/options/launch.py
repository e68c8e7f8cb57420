"""A launch's options, checked. ``arguments`` creates them from a command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from meshlib._launcher.options.output import OutputOptions

FAILURE_GRACE_SECONDS = 3.0
"""The time between SIGTERM and SIGKILL after a rank's failure or Ctrl-C."""
SIGNAL_GRACE_SECONDS = 30.0
"""The time between SIGTERM and SIGKILL if the launcher is told to end: ranks may be saving."""
SLURM_GRACE_SECONDS = 25.0
"""The same time under Slurm, which kills everything KillWait (30 s) after its own SIGTERM."""


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The program of each rank: a Python script, a module (``-m``) or an executable. For
    ``spawn`` it is a function.
    """

    kind: Literal["script", "module", "program", "function"]
    target: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The number of nodes, and their rendezvous. Times are in seconds.

    ``rank`` is None if it is assigned by arrival. ``is_host``: this node serves the store (1) or
    not (0); -1: its address decides. With the URL ``etcd`` the store is in etcd and outlives every
    node; ``host`` and ``port`` are those of etcd's first member.
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
    etcd: str = ""

    @property
    def many(self) -> bool:
        """True if the job may have more than one node."""
        return self.most > 1


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node of this machine, with those of its CPUs that this process may use."""

    number: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostOptions:
    """A job that this process starts on several hosts over ssh.

    ``hosts`` are names for ssh, each with its ``--nproc-per-node`` (None: from the arguments). The
    store is at ``address`` (None: the first host's in ssh's configuration). ``arguments`` are
    meshrun's, for each host. ``variables`` are forwarded. ``ssh`` is the command, ``python`` the
    interpreter on the hosts.
    """

    hosts: tuple[tuple[str, str | None], ...]
    arguments: tuple[str, ...]
    address: str | None
    port: int
    job: str
    secret: str
    variables: dict[str, str]
    ssh: tuple[str, ...]
    python: str
    continues: bool


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """One launch on one node. Times are in seconds.

    The time between SIGTERM and SIGKILL is ``failure_grace`` for the other ranks after a failure,
    and ``signal_grace`` for all ranks if the launcher is told to end. With ``engine_signals``, the
    sender of a signal to the launcher also signals the ranks.

    Local rank i is bound to the CPUs of ``cpus[i]``, if there are any. With ``hosts``, all other
    options are in their arguments.

    ``quiet``: another launcher prints the job's final report.

    The ``notes`` name the sources of options that were not on the command line. The ``warnings``
    are printed before anything starts.

    ``on_failure`` determines whether the other ranks end or continue after a failure. If they
    continue, up to ``replace`` ranks are replaced, and ``spares`` additional ranks wait for a
    place.

    Ranks ``start`` as forks of one process with preloaded modules, or each with ``exec``. The job's
    page is served at ``monitor``, a host and a port (0: any), unless it is None.
    """

    program: RankProgram
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
    quiet: bool = False
    engine_signals: bool = False
    cpus: tuple[NumaNode, ...] = ()
    hosts: HostOptions | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def continues(self) -> bool:
        """True if ranks continue when others are lost."""
        return self.on_failure == "continue"
