"""Which launcher started this process, and what place it gave it.

One small class a launcher reads its variables; ``detect`` asks them in turn.
"""

from __future__ import annotations

import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

from transport import environment
from transport.errors import DistError
from transport.sockets import LOOPBACK

DEFAULT_PORT = 29500
_DERIVED_PORTS = range(20000, 29000)

Variables = Mapping[str, str]


class LaunchEnvironmentError(DistError, ValueError):
    """The environment does not say what is needed; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a launcher tells a process. None: it does not say.

    ``launcher`` is its name, for messages.
    """

    launcher: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


class LaunchEnvironment(ABC):
    """A launcher, recognised by the variables that it sets."""

    name: str

    @abstractmethod
    def is_present(self, variables: Variables) -> bool:
        """Return whether this launcher started the process."""

    @abstractmethod
    def place(self, variables: Variables) -> Place:
        """Return what it says. Raises LaunchEnvironmentError for a value that is no number."""


class Torchrun(LaunchEnvironment):
    """meshrun, torchrun, and people who set torchrun's variables themselves."""

    name = "meshrun or torchrun"

    def is_present(self, variables: Variables) -> bool:
        """See the base."""
        return bool(variables.get(environment.RANK) or variables.get(environment.WORLD_SIZE))

    def place(self, variables: Variables) -> Place:
        """See the base."""
        return Place(
            self.name,
            number_in(variables, environment.RANK),
            number_in(variables, environment.WORLD_SIZE),
            number_in(variables, environment.LOCAL_RANK),
            number_in(variables, environment.LOCAL_WORLD_SIZE),
        )


class Slurm(LaunchEnvironment):
    """Slurm's srun. Rank 0 is on the first node of the list; the port comes from the job's id."""

    name = "Slurm"

    def is_present(self, variables: Variables) -> bool:
        """See the base. A batch script is not a task: srun alone sets the task's number."""
        return bool(variables.get("SLURM_PROCID") and self._size_name(variables))

    def place(self, variables: Variables) -> Place:
        """See the base."""
        nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
        job = variables.get("SLURM_JOB_ID")
        step = variables.get("SLURM_STEP_ID", "")
        return Place(
            self.name,
            number_in(variables, "SLURM_PROCID"),
            number_in(variables, self._size_name(variables)),
            number_in(variables, "SLURM_LOCALID"),
            self._local_size(variables),
            first_host(nodes) if nodes else None,
            derived_port(f"slurm {job} {step}") if job else None,
        )

    @staticmethod
    def _size_name(variables: Variables) -> str:
        names = "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"
        return next((name for name in names if variables.get(name)), "")

    @staticmethod
    def _local_size(variables: Variables) -> int | None:
        # "2(x3),1": nodes 0 to 2 have two tasks each, node 3 has one.
        text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE")
        node = number_in(variables, "SLURM_NODEID")
        if not text or node is None:
            return None
        counts: list[int] = []
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
            counts += [int(count)] * int(times or 1)
        return counts[node] if node < len(counts) else None


class OpenMPI(LaunchEnvironment):
    """Open MPI's mpirun. On one host it needs no more; on several, MASTER_ADDR."""

    name = "Open MPI"

    def is_present(self, variables: Variables) -> bool:
        """See the base."""
        return bool(variables.get("OMPI_COMM_WORLD_RANK"))

    def place(self, variables: Variables) -> Place:
        """See the base."""
        size = number_in(variables, "OMPI_COMM_WORLD_SIZE")
        local_size = number_in(variables, "OMPI_COMM_WORLD_LOCAL_SIZE")
        job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid")
        return Place(
            self.name,
            number_in(variables, "OMPI_COMM_WORLD_RANK"),
            size,
            number_in(variables, "OMPI_COMM_WORLD_LOCAL_RANK"),
            local_size,
            LOOPBACK if size is not None and size == local_size else None,
            derived_port(f"openmpi {job}") if job else DEFAULT_PORT,
        )


class PMI(LaunchEnvironment):
    """Launchers with the process management interface: MPICH, Intel MPI, others."""

    name = "PMI"

    def is_present(self, variables: Variables) -> bool:
        """See the base."""
        return bool(variables.get("PMI_RANK"))

    def place(self, variables: Variables) -> Place:
        """See the base."""
        size = number_in(variables, "PMI_SIZE")
        local_size = number_in(variables, "MPI_LOCALNRANKS")
        return Place(
            self.name,
            number_in(variables, "PMI_RANK"),
            size,
            number_in(variables, "MPI_LOCALRANKID"),
            local_size,
            LOOPBACK if size is not None and size == local_size else None,
            DEFAULT_PORT,
        )


KNOWN: tuple[LaunchEnvironment, ...] = (Torchrun(), Slurm(), OpenMPI(), PMI())


def detect(variables: Variables | None = None) -> Place:
    """Return what this process' launcher says; nothing, under the name "no launcher", without one.

    MASTER_ADDR and MASTER_PORT, where set, are stronger than what a launcher implies.
    """
    variables = os.environ if variables is None else variables
    present = (known.place(variables) for known in KNOWN if known.is_present(variables))
    place = next(present, Place("no launcher"))
    address = variables.get(environment.MASTER_ADDR)
    port = number_in(variables, environment.MASTER_PORT)
    return replace(
        place,
        master_addr=address or place.master_addr,
        master_port=place.master_port if port is None else port,
    )


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list: ``gpu[03-05,9],login`` gives ``gpu03``."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^,]*))?", node_list)
    assert match is not None  # it matches the empty string
    prefix, number, suffix = match.groups(default="")
    return prefix + number + suffix


def derived_port(job: str) -> int:
    """Return a port that all processes of ``job`` compute alike."""
    return _DERIVED_PORTS[zlib.crc32(job.encode()) % len(_DERIVED_PORTS)]


def number_in(variables: Variables, name: str) -> int | None:
    """Return the number that the variable ``name`` holds, None when it is not set or empty.

    Raises LaunchEnvironmentError for what is no number.
    """
    text = variables.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchEnvironmentError(
            f"environment variable {name} must be a whole number, got {text!r}"
        ) from None
