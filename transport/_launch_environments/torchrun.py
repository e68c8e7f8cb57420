"""meshrun, torchrun, and variables of torchrun set by hand."""

from __future__ import annotations

from transport import _environment as environment
from transport._launch_environments.base import (
    LaunchEnvironment,
    NodePlace,
    RankPlace,
    Variables,
    number_in,
)

_PLACES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RDZV_ENDPOINT", "NPROC_PER_NODE")


class Torchrun(LaunchEnvironment):
    """meshrun or torchrun, which set ``RANK`` and ``WORLD_SIZE`` for each rank.

    For a node, Kubeflow and many charts set ``PET_`` variables, named after torchrun's options.
    """

    name = "meshrun or torchrun"
    key = "torchrun"

    def place(self, variables: Variables) -> RankPlace | None:
        if not (variables.get(environment.RANK) or variables.get(environment.WORLD_SIZE)):
            return None
        return RankPlace(
            self.name,
            number_in(variables, environment.RANK),
            number_in(variables, environment.WORLD_SIZE),
            number_in(variables, environment.LOCAL_RANK),
            number_in(variables, environment.LOCAL_WORLD_SIZE),
        )

    def node(self, variables: Variables) -> NodePlace | None:
        if not any(variables.get(f"PET_{name}") for name in _PLACES):
            return None
        host, port = variables.get("PET_MASTER_ADDR"), number_in(variables, "PET_MASTER_PORT")
        endpoint = variables.get("PET_RDZV_ENDPOINT")
        if endpoint and not host:
            name, _, digits = endpoint.rpartition(":")
            host, port = (name, int(digits)) if name and digits.isdigit() else (endpoint, port)
        return NodePlace(
            "PET_ variables",
            variables.get("PET_NNODES") or None,
            number_in(variables, "PET_NODE_RANK"),
            variables.get("PET_NPROC_PER_NODE") or None,
            host or None,
            port,
            variables.get("PET_RDZV_ID") or None,
        )
