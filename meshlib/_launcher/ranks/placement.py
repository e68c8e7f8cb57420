"""The placement of ranks: a node's place in an attempt to run the job, and a rank's place.

meshrun, spawn and the adapters of engines set the same variables, by which ``init_process_group()``
finds the job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from transport import _environment as environment

_OF_A_LAUNCH = (
    environment.MESH,
    environment.LAUNCHER,
    environment.ERROR_FILE,
    environment.CPUS,
)


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """A node's place in one attempt to run the job, and the store that its ranks use.

    If the store is in etcd, ``store_url`` is its URL and the host is etcd's first member.
    """

    attempt: int
    node: int
    nodes: int
    first_rank: int
    ranks: int
    world_size: int
    store_host: str
    store_port: int
    secret: str
    store_url: str = ""

    def variables(self) -> dict[str, str]:
        """Return the variables that are equal for all ranks of the node."""
        secret = {environment.SECRET: self.secret} if self.secret else {}
        store = f"{self.store_host}:{self.store_port} {self.store_url}".rstrip()
        return secret | {
            environment.WORLD_SIZE: str(self.world_size),
            environment.LOCAL_WORLD_SIZE: str(self.ranks),
            environment.GROUP_RANK: str(self.node),
            environment.GROUP_WORLD_SIZE: str(self.nodes),
            environment.MASTER_ADDR: self.store_host,
            environment.MASTER_PORT: str(self.store_port),
            environment.AGENT_STORE: store,
            environment.RESTART_COUNT: str(self.attempt),
        }

    def variables_of(self, rank: int, local_rank: int) -> dict[str, str]:
        """Return the variables of one rank."""
        own = {environment.RANK: str(rank), environment.LOCAL_RANK: str(local_rank)}
        return own | ({environment.JOIN: "1"} if rank >= self.world_size else {})


def node_environment(
    inherited: Mapping[str, str], placement: NodePlacement, mine: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the environment of a node's ranks.

    It is ``inherited`` with the variables of ``placement`` and those in ``mine`` that are not None,
    but without the variables of an enclosing launch.
    """
    variables = {name: text for name, text in inherited.items() if name not in _OF_A_LAUNCH}
    for name in environment.TLS:
        if variables.get(name):
            variables[name] = os.path.abspath(variables[name])  # ranks may change directory
    variables |= placement.variables()
    return variables | {name: text for name, text in mine.items() if text is not None}


def limit_threads(variables: dict[str, str], ranks: int) -> None:
    """Make each of several ``ranks`` compute with one thread, unless the number is already set.

    Otherwise each rank would start a thread for every core, which is slower.
    """
    if ranks > 1:
        variables.setdefault("OMP_NUM_THREADS", "1")
