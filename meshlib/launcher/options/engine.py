"""What the command line does not say of the nodes is asked of the engine that started meshrun.

The command line comes first, then torchrun's ``PET_`` variables, then the engine. A node's number
and the address at which nodes meet are one answer and are taken from one source: node 0 is at that
address.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TypedDict

from meshlib.launcher.ranks.patience import SIGNAL_GRACE_SECONDS, SLURM_GRACE_SECONDS
from transport import environment
from transport.launch_environments import (
    LaunchEnvironmentError,
    NodePlace,
    Slurm,
    detect_nodes,
    engine_restarts,
    number_in,
)

NO_JOB = "none"
_TEXTS = {"rdzv_backend": "PET_RDZV_BACKEND", "rdzv_conf": "PET_RDZV_CONF"}


class Patience(TypedDict):
    """Fields of ``LaunchOptions``."""

    engine_signals: bool
    signal_grace: float


def ask_engine(given: argparse.Namespace, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Fill in what the parsed command line leaves open; return what was filled in, and by whom.

    Raises ValueError (LaunchEnvironmentError) when an engine speaks of several nodes and not of
    how they meet, and when what it says would make wrong worlds.
    """
    notes: list[str] = []
    inside = bool(variables.get(environment.RUN_ID))
    if not given.standalone and not inside:
        _take_torchruns_options(given, variables)
        if not _complete(given):
            for place in detect_nodes(variables):
                notes += _take(given, place)
                if _complete(given):
                    break
    given.nnodes = given.nnodes or "1"
    restarts = 0 if inside else engine_restarts(variables)
    given.rdzv_id = given.rdzv_id or NO_JOB
    if restarts and given.nnodes != "1":
        given.rdzv_id += f"~{restarts}"
        notes.append(f"the engine has restarted this job {restarts} times: it is {given.rdzv_id}")
    return tuple(notes)


def patience_under_engine(variables: Mapping[str, str]) -> Patience:
    """Return how to treat signals: whether ranks get the engine's own, and how long they have."""
    try:
        slurm = Slurm.in_step(variables)
    except LaunchEnvironmentError:
        slurm = False
    return Patience(
        engine_signals=slurm, signal_grace=SLURM_GRACE_SECONDS if slurm else SIGNAL_GRACE_SECONDS
    )


def _take_torchruns_options(given: argparse.Namespace, variables: Mapping[str, str]) -> None:
    for name, variable in _TEXTS.items():
        setattr(given, name, getattr(given, name) or variables.get(variable) or None)
    if given.max_restarts is None:
        given.max_restarts = number_in(variables, "PET_MAX_RESTARTS")


def _has_address(given: argparse.Namespace) -> bool:
    return bool(given.rdzv_endpoint or given.master_addr)


def _complete(given: argparse.Namespace) -> bool:
    """Return whether nothing is left to be asked."""
    return given.nnodes is not None and (given.nnodes == "1" or _has_address(given))


def _take(given: argparse.Namespace, place: NodePlace) -> list[str]:
    """Take from an engine's answer what is open; return what was taken, in words."""
    taken: list[str] = []
    if given.nnodes is None:
        if place.nodes is None and place.node is not None:
            raise LaunchEnvironmentError(
                f"{place.launcher} says that this is node {place.node}, and not of how many:"
                " expected --nnodes N, or --standalone for a job on this node alone"
            )
        if place.nodes is not None:
            given.nnodes = place.nodes
            taken.append(f"--nnodes {place.nodes}")
    if given.nproc_per_node is None and given.mesh is None and place.ranks:
        given.nproc_per_node = place.ranks
        taken.append(f"--nproc-per-node {place.ranks}")
    if given.nnodes not in (None, "1"):
        taken += _take_meeting(given, place)
    return [f"{place.launcher} says {' '.join(taken)}"] if taken else []


def _take_meeting(given: argparse.Namespace, place: NodePlace) -> list[str]:
    taken: list[str] = []
    if not given.rdzv_id and place.job:
        given.rdzv_id = place.job
        taken.append(f"--rdzv-id {place.job}")
    if _has_address(given):
        return taken
    if place.host is None:
        raise LaunchEnvironmentError(
            f"{place.launcher} says that there are {given.nnodes} nodes, and not where they meet:"
            " expected --master-addr HOST, the address of node 0, or --rdzv-endpoint HOST:PORT"
        )
    given.master_addr = place.host
    taken.append(f"--master-addr {place.host}")
    if given.master_port is None and place.port is not None:
        given.master_port = place.port
        taken.append(f"--master-port {place.port}")
    numbered = ":" not in given.nnodes and given.rdzv_backend in (None, "static")
    if given.node_rank is None and place.node is not None and numbered:
        given.node_rank = place.node
        taken.append(f"--node-rank {place.node}")
    return taken
