"""Environment variables that make the worker processes of an engine's library ranks."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from meshlib._launcher.ranks.placement import NodePlacement
from transport import _environment as environment
from transport._net.auth import new_secret
from transport._store.tcp.server import TCPStoreServer


@dataclass(frozen=True, slots=True)
class AttemptVariables:
    """The values that all ranks of an attempt share; ``mesh`` is that of ``meshrun --mesh``."""

    name: str
    attempt: int
    host: str
    port: int
    secret: str
    mesh: str | None

    def variables(self, rank: int, nodes: Sequence[str], host: str) -> dict[str, str]:
        """Return the variables of the process ``rank``. ``nodes`` has the machine of each rank, in
        the order of ranks; ``host`` is the address of this rank's machine.
        """
        nodes = list(nodes)
        node = nodes[rank]
        order = list(dict.fromkeys(nodes))
        placement = NodePlacement(
            attempt=self.attempt,
            node=order.index(node),
            nodes=len(order),
            first_rank=nodes.index(node),
            ranks=nodes.count(node),
            world_size=len(nodes),
            store_host=self.host,
            store_port=self.port,
            secret=self.secret,
        )
        own = placement.variables_of(rank, nodes[:rank].count(node))
        own |= {environment.RUN_ID: self.name, environment.LAUNCHER: "", environment.HOST: host}
        return placement.variables() | own | ({environment.MESH: self.mesh} if self.mesh else {})


class AttemptStore:
    """The store of one attempt to run a ``job``, served by this process.

    Ranks reach this process at the address ``host``. The kernel chooses the port. Each attempt has
    its own secret, so processes of another attempt cannot join.
    """

    def __init__(self, host: str, name: str, mesh: str | None, number: int = 0) -> None:
        secret = new_secret()
        self._server = TCPStoreServer("", 0, secret=secret)
        self.job: AttemptVariables = AttemptVariables(
            name, number, host, self._server.port, secret.hex(), mesh
        )

    def close(self) -> None:
        """Stop serving the store. Idempotent."""
        self._server.close()


@contextmanager
def rank_variables(variables: dict[str, str]) -> Generator[None]:
    """Set a rank's variables in this process while the ``with`` block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
