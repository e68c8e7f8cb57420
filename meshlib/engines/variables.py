"""The variables that make a process a rank, where an engine's library hands them out itself."""

from __future__ import annotations

import os
from collections.abc import Sequence

from transport import environment
from transport.net.auth import new_secret
from transport.store.tcp.server import TCPStoreServer


class Attempt:
    """One attempt to run a job: a store, served from here, that its ranks meet in.

    ``host`` is the address at which ranks reach this process. The kernel chooses the port, and each
    attempt has a secret of its own, so what is left of another one cannot join.
    """

    def __init__(self, host: str, job: str, number: int = 0) -> None:
        secret = new_secret()
        self._server = TCPStoreServer("", 0, secret=secret)
        self._variables = {
            environment.MASTER_ADDR: host,
            environment.MASTER_PORT: str(self._server.port),
            environment.AGENT_STORE: f"{host}:{self._server.port}",
            environment.SECRET: secret.hex(),
            environment.RUN_ID: job,
            environment.RESTART_COUNT: str(number),
            environment.LAUNCHER: "",
        }

    def variables(self, mesh: str | None = None) -> dict[str, str]:
        """Return what is equal on all ranks."""
        return self._variables | ({environment.MESH: mesh} if mesh else {})

    def close(self) -> None:
        """Stop serving the store. Idempotent."""
        self._server.close()


def place_variables(rank: int, nodes: Sequence[str], host: str) -> dict[str, str]:
    """Return what is ``rank``'s own: ``nodes`` names each rank's machine, by rank; ``host`` is the
    address of its own.
    """
    nodes = list(nodes)
    node = nodes[rank]
    order = list(dict.fromkeys(nodes))
    return {
        environment.RANK: str(rank),
        environment.WORLD_SIZE: str(len(nodes)),
        environment.LOCAL_RANK: str(nodes[:rank].count(node)),
        environment.LOCAL_WORLD_SIZE: str(nodes.count(node)),
        environment.GROUP_RANK: str(order.index(node)),
        environment.GROUP_WORLD_SIZE: str(len(order)),
        environment.HOST: host,
    }


class RankVariables:
    """Sets a rank's variables in this process while its ``with`` block runs."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> RankVariables:
        self._before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
