"""SkyPilot, which executes the ``run`` commands of a task once on each node."""

from __future__ import annotations

from transport._launch_environments.base import (
    LaunchEnvironment,
    LaunchEnvironmentError,
    NodePlace,
    Variables,
    derived_port,
    needed_number,
    number_in,
)


class SkyPilot(LaunchEnvironment):
    """SkyPilot, which gives each node its number and the addresses of all nodes."""

    name = "SkyPilot"
    key = "skypilot"

    def node(self, variables: Variables) -> NodePlace | None:
        if not variables.get("SKYPILOT_NODE_RANK"):
            return None
        hosts = variables.get("SKYPILOT_NODE_IPS", "").split()
        nodes = needed_number(variables, "SKYPILOT_NUM_NODES", self.name)
        if len(hosts) != nodes:
            raise LaunchEnvironmentError(
                f"SKYPILOT_NUM_NODES is {nodes}, but SKYPILOT_NODE_IPS has {len(hosts)} addresses;"
                " expected one for each node"
            )
        task = variables.get("SKYPILOT_TASK_ID")
        gpus = number_in(variables, "SKYPILOT_NUM_GPUS_PER_NODE")
        return NodePlace(
            self.name,
            str(nodes),
            needed_number(variables, "SKYPILOT_NODE_RANK", self.name),
            str(gpus) if gpus else None,
            hosts[0],
            derived_port(f"skypilot {task}") if task else None,
            task or None,
        )
