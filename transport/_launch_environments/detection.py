"""The detection of the engine that started this process: the first match supplies all values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from transport import _environment as environment
from transport._launch_environments.base import (
    LaunchEnvironment,
    LaunchEnvironmentError,
    NodePlace,
    RankPlace,
    Variables,
    number_in,
)
from transport._launch_environments.kubernetes import IndexedJob, LeaderWorkerSet
from transport._launch_environments.mpi import PMI, OpenMPI
from transport._launch_environments.skypilot import SkyPilot
from transport._launch_environments.slurm import Slurm
from transport._launch_environments.torchrun import Torchrun

NONE = "none"
"""The value of ``MESHLIB_LAUNCHER`` for a process that is the only rank."""

# A rank's nearest launcher comes first: in a Slurm job, MPI's daemons are Slurm tasks, and the
# ranks inherit their Slurm variables.
KNOWN: tuple[LaunchEnvironment, ...] = (
    Torchrun(),
    OpenMPI(),
    PMI(),
    SkyPilot(),
    LeaderWorkerSet(),
    IndexedJob(),
    Slurm(),
)


def detect(variables: Variables | None = None) -> RankPlace:
    """Return the place that this process's launcher assigned; empty, with the launcher
    "no launcher", if none did.

    MASTER_ADDR and MASTER_PORT override the launcher's values. ``MESHLIB_LAUNCHER`` selects the
    only launcher to check; ``none`` makes a world of one. Raises LaunchEnvironmentError if it names
    an unknown launcher, or one that did not start this process.
    """
    variables = os.environ if variables is None else variables
    chosen = chosen_launcher(variables)
    if chosen == NONE:
        return RankPlace(f"{environment.LAUNCHER}={NONE}", 0, 1, 0, 1)
    found = (engine.place(variables) for engine in _candidates(chosen))
    place = next((place for place in found if place is not None), None)
    if place is None:
        _require_unchosen(chosen, variables, "a rank")
        place = RankPlace("no launcher")
    address = variables.get(environment.MASTER_ADDR)
    port = number_in(variables, environment.MASTER_PORT)
    return replace(
        place,
        master_addr=address or place.master_addr,
        master_port=place.master_port if port is None else port,
    )


def launched_local_rank() -> int | None:
    """Return the local rank that this process's launcher assigned, or None."""
    local_rank = number_in(os.environ, environment.LOCAL_RANK)
    return detect().local_rank if local_rank is None else local_rank


def detect_nodes(variables: Variables | None = None) -> Iterator[NodePlace]:
    """Yield the place of this node's agent according to each engine, nearest first, lazily.

    Yields nothing inside a rank, where a launcher starts a separate job. Raises
    LaunchEnvironmentError as ``detect`` and ``LaunchEnvironment.node`` do.
    """
    variables = os.environ if variables is None else variables
    chosen = chosen_launcher(variables)
    if chosen == NONE or variables.get(environment.RUN_ID):
        return
    found = False
    for engine in _candidates(chosen):
        place = engine.node(variables)
        if place is not None:
            found = True
            yield place
    if not found and chosen != Torchrun.key:
        _require_unchosen(chosen, variables, "a node's launcher")


def engine_restarts(variables: Variables | None = None) -> int:
    """Return how often the engine has restarted the whole job; 0 if unknown."""
    variables = os.environ if variables is None else variables
    names = environment.ENGINE_RESTARTS, "SLURM_RESTART_COUNT"
    return next((count for name in names if (count := number_in(variables, name))), 0)


def hints(variables: Variables) -> str:
    """Return why a process with some variables of engines is not a rank; empty without any."""
    return "; ".join(filter(None, (engine.hint(variables) for engine in KNOWN)))


def chosen_launcher(variables: Variables) -> str | None:
    """Return the launcher that ``MESHLIB_LAUNCHER`` names, or None if it is not set.

    Raises LaunchEnvironmentError for an unknown name.
    """
    key = variables.get(environment.LAUNCHER, "").strip().lower()
    if not key:
        return None
    keys = [NONE, *(engine.key for engine in KNOWN)]
    if key not in keys:
        raise LaunchEnvironmentError(
            f"environment variable {environment.LAUNCHER} must be one of {', '.join(keys)}; got"
            f" {variables[environment.LAUNCHER]!r}"
        )
    return key


def _candidates(chosen: str | None) -> list[LaunchEnvironment]:
    return [engine for engine in KNOWN if chosen in (None, engine.key)]


def _require_unchosen(chosen: str | None, variables: Variables, what: str) -> None:
    if chosen is not None:
        engine = _candidates(chosen)[0]
        why = engine.hint(variables) or f"its variables are not in the environment of {what}"
        raise LaunchEnvironmentError(
            f"{environment.LAUNCHER} is {chosen}, but {engine.name} has not started this process"
            f" as {what}: {why}"
        )
