"""Slurm: each task of a step is a rank, or a node's agent.

Only the variables of a step count. A batch script and a shell in an allocation also have
``SLURM_PROCID=0`` and ``SLURM_NTASKS``, but are not tasks. An ssh session may have only some of the
variables.
"""

from __future__ import annotations

import re

from transport._launch_environments.base import (
    LaunchEnvironment,
    LaunchEnvironmentError,
    NodePlace,
    RankPlace,
    Variables,
    derived_port,
    needed_number,
    number_in,
)
from transport._net import LOOPBACK

_SPECIAL_STEPS = 0xFFFFFFF0
"""From this number on, step ids denote an interactive shell or a batch script (``slurm.h``:
SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT)."""
_COMMAND = "srun --ntasks-per-node=1 meshrun ..."


class Slurm(LaunchEnvironment):
    """Slurm: ``srun python`` starts ranks, ``srun --ntasks-per-node=1 meshrun`` starts agents.

    Rank or node 0 is on the first node of the step's list; the port is derived from the step id.
    """

    name = "Slurm"
    key = "slurm"

    def place(self, variables: Variables) -> RankPlace | None:
        if not self.in_step(variables):
            return None
        size, local_size = step_size(variables), self._local_size(variables)
        first = first_host(variables["SLURM_STEP_NODELIST"])
        return RankPlace(
            self.name,
            needed_number(variables, "SLURM_PROCID", self.name),
            size,
            number_in(variables, "SLURM_LOCALID"),
            local_size,
            LOOPBACK if size == local_size else first,
            derived_port(self._step_name(variables)),
        )

    def node(self, variables: Variables) -> NodePlace | None:
        if not self.in_step(variables):
            nodes = number_in(variables, "SLURM_JOB_NUM_NODES") or 1
            if nodes > 1:
                raise LaunchEnvironmentError(
                    f"Slurm's job {variables.get('SLURM_JOB_ID')} has {nodes} nodes, and meshrun"
                    f" was not started by srun on each of them. Expected {_COMMAND}, or"
                    " --standalone for a job on this node alone"
                )
            return None
        tasks = step_size(variables)
        nodes = needed_number(variables, "SLURM_STEP_NUM_NODES", self.name)
        if tasks != nodes:
            raise LaunchEnvironmentError(
                f"srun has started {tasks} tasks on {nodes} nodes, but each meshrun starts the"
                f" ranks of a whole node. Expected {_COMMAND}, or srun python without meshrun"
            )
        step = self._step_name(variables)
        return NodePlace(
            self.name,
            str(nodes),
            needed_number(variables, "SLURM_NODEID", self.name),
            None,
            first_host(variables["SLURM_STEP_NODELIST"]),
            derived_port(step),
            f"slurm-{variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']}",
        )

    def hint(self, variables: Variables) -> str:
        if not any(name.startswith("SLURM_") for name in variables) or self.in_step(variables):
            return ""
        found = [
            f"{name}={variables[name]}"
            for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS")
            if variables.get(name)
        ]
        return (
            f"some Slurm variables are set ({', '.join(found) or 'none of a task'}), but not"
            " those of a task that srun has started (SLURM_STEP_ID and SLURM_STEP_NODELIST)."
            " A batch script, a shell in an allocation and an ssh session are not ranks."
            " Expected srun python ..."
        )

    @staticmethod
    def in_step(variables: Variables) -> bool:
        """Return whether srun has started this process.

        Raises LaunchEnvironmentError if only some of a task's variables are set.
        """
        step = number_in(variables, "SLURM_STEP_ID")
        if step is None or not 0 <= step < _SPECIAL_STEPS:
            return False
        if not variables.get("SLURM_STEP_NODELIST"):
            return False
        for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID"):
            if not variables.get(name):
                raise LaunchEnvironmentError(
                    f"this process has SLURM_STEP_ID={step} but not {name}, so it is not a task of"
                    " a Slurm step; perhaps ssh passed the variables on. Expected srun python ...,"
                    " or MESHLIB_LAUNCHER=none to run it alone"
                )
        return True

    @staticmethod
    def _step_name(variables: Variables) -> str:
        restarts = number_in(variables, "SLURM_RESTART_COUNT") or 0
        again = f" restart {restarts}" if restarts else ""
        return f"slurm {variables['SLURM_JOB_ID']} {variables['SLURM_STEP_ID']}{again}"

    @staticmethod
    def _local_size(variables: Variables) -> int | None:
        # In "2(x3),1", nodes 0 to 2 have two tasks each, and node 3 has one.
        text = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
        node = needed_number(variables, "SLURM_NODEID", Slurm.name)
        counts: list[int] = []
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
            counts += [int(count)] * int(times or 1)
        return counts[node] if 0 <= node < len(counts) else None


def step_size(variables: Variables) -> int | None:
    """Return the number of tasks in this process's step, or None outside a step."""
    return number_in(variables, "SLURM_STEP_NUM_TASKS")


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list: ``gpu03`` for ``gpu[03-05,9],login``."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^,]*))?", node_list)
    assert match is not None  # The pattern matches even the empty string.
    prefix, number, suffix = match.groups(default="")
    return prefix + number + suffix


def job_host(variables: Variables) -> str | None:
    """Return the first host of the Slurm job around this process, or None outside a job.

    By default, MPI's launchers in an allocation start rank 0 there.
    """
    nodes = variables.get("SLURM_JOB_NODELIST")
    return first_host(nodes) if nodes else None
