"""A launch's options, checked. ``arguments`` makes them from a command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from meshlib._launcher.options.output import OutputOptions

FAILURE_GRACE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL when a rank has failed, or after Ctrl-C."""
SIGNAL_GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL when the launcher itself was told to end: ranks may be saving."""
SLURM_GRACE_SECONDS = 25.0
"""The same under Slurm, which kills everything KillWait (30 s) after its own SIGTERM."""


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
    """The number of nodes, and their meeting point. Times are in seconds.

    ``rank`` is None if it is assigned by arrival; ``is_host``: whether this node serves the store,
    1 or 0, -1 where its address tells. With the URL ``etcd`` the store is there, where it outlives
    every node; ``host`` and ``port`` are those of its first member.
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
    """A NUMA node of this machine, with its CPUs that this process may use."""

    number: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostOptions:
    """A job that is started on several hosts over ssh, from here.

    ``hosts`` are names for ssh, each with its ``--nproc-per-node`` (None: the arguments say it).
    Nodes meet at ``address`` (None: what ssh's configuration calls the first host). ``arguments``
    are meshrun's own, for each host. ``variables`` go along. ``ssh`` is the command, ``python`` the
    interpreter there.
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

    The time between SIGTERM and SIGKILL is ``failure_grace`` for the other ranks when one has
    failed, and ``signal_grace`` for all when the launcher itself is told to end. With
    ``engine_signals``, the sender of a signal to the launcher has signalled its ranks, too.

    Local rank i is bound to the CPUs of ``cpus[i]``, if there are any. With ``hosts`` all else
    stands in their arguments.

    ``quiet``: another launcher of the job prints the report of its end.

    The ``notes`` name the sources of options that were not on the command line. The ``warnings``
    are printed before anything starts.

    After a failure the other ranks end or go on, as ``on_failure`` says. If they go on, up to
    ``replace`` ranks are replaced, and ``spares`` are ranks beyond the job's that wait for a place.

    Ranks ``start`` as forks of one process that has imported for them, or each with ``exec``. The
    job's page is served at ``monitor``, a host and a port (0: any), unless that is None.
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
        """True if ranks go on when others are lost."""
        return self.on_failure == "continue"
