"""MPI's launchers: Open MPI's mpirun, and launchers with the process management interface (PMI).

On one host, their variables suffice. On several hosts, rank 0 is assumed to be on the first host of
the surrounding Slurm job; otherwise the user must set MASTER_ADDR.
"""

from __future__ import annotations

from transport._launch_environments.base import (
    DEFAULT_PORT,
    LaunchEnvironment,
    LaunchEnvironmentError,
    NodePlace,
    RankPlace,
    Variables,
    derived_port,
    number_in,
)
from transport._launch_environments.slurm import Slurm, job_host, step_size
from transport._net import LOOPBACK


class _MpiEnvironment(LaunchEnvironment):
    """The base of both MPI launchers, which derives a node's place from a rank's place."""

    def node(self, variables: Variables) -> NodePlace | None:
        """Return the place of a node whose only process is its agent."""
        place = self.place(variables)
        if place is None or place.world_size in (None, 1):
            return None
        if place.local_world_size not in (None, 1):
            raise LaunchEnvironmentError(
                f"{self.name} has started {place.local_world_size} processes on this node, but"
                " each meshrun starts the ranks of a whole node. Expected one process on each node"
                " (mpirun --map-by ppr:1:node, mpiexec -ppn 1), or mpirun python without meshrun"
            )
        return NodePlace(
            self.name,
            str(place.world_size),
            place.rank,
            None,
            place.master_addr,
            place.master_port,
            f"{self.key}-{place.master_port}",
        )


class OpenMPI(_MpiEnvironment):
    """Open MPI's mpirun."""

    name = "Open MPI"
    key = "openmpi"

    def place(self, variables: Variables) -> RankPlace | None:
        if not variables.get("OMPI_COMM_WORLD_RANK"):
            return None
        size = number_in(variables, "OMPI_COMM_WORLD_SIZE")
        local_size = number_in(variables, "OMPI_COMM_WORLD_LOCAL_SIZE")
        job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid")
        return RankPlace(
            self.name,
            number_in(variables, "OMPI_COMM_WORLD_RANK"),
            size,
            number_in(variables, "OMPI_COMM_WORLD_LOCAL_RANK"),
            local_size,
            LOOPBACK if size is not None and size == local_size else job_host(variables),
            derived_port(f"openmpi {job}") if job else DEFAULT_PORT,
        )


class PMI(_MpiEnvironment):
    """Launchers with the process management interface, such as MPICH's Hydra and Intel MPI.

    ``srun --mpi=pmi2`` also sets PMI variables, but its ranks belong to ``Slurm``.
    """

    name = "PMI"
    key = "pmi"

    def place(self, variables: Variables) -> RankPlace | None:
        if not variables.get("PMI_RANK"):
            return None
        size = number_in(variables, "PMI_SIZE")
        if size is not None and size == step_size(variables) and Slurm.in_step(variables):
            return None
        local_size = number_in(variables, "MPI_LOCALNRANKS")
        job = variables.get("SLURM_JOB_ID")
        return RankPlace(
            self.name,
            number_in(variables, "PMI_RANK"),
            size,
            number_in(variables, "MPI_LOCALRANKID"),
            local_size,
            LOOPBACK if size is not None and size == local_size else job_host(variables),
            derived_port(f"pmi {job} {variables.get('SLURM_STEP_ID')}") if job else DEFAULT_PORT,
        )
