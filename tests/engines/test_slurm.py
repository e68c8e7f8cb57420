"""Under a real Slurm: ``make test-slurm``. Without MESHLIB_TEST_SLURM it is skipped."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.slurm_cluster import SlurmCluster, why_not

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(400),  # two waits of 150 s, each of which says what it waited for
    pytest.mark.skipif(not os.environ.get("MESHLIB_TEST_SLURM"), reason="run by make test-slurm"),
]
PYTHON = sys.executable
MESHRUN = str(Path(sys.executable).with_name("meshrun"))
HELLO = """
    import numpy as np
    import meshlib as dist

    dist.init_process_group(timeout=60)
    x = np.array([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    local = dist.get_node_local_rank()
    said = f"rank {dist.get_rank()}/{dist.get_world_size()} local {local} sum {x[0]:g};"
    print(said, flush=True)
    dist.destroy_process_group()
"""
SAVES = (PROGRAMS / "saves.py").read_text()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    made = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    (made.folder / "config").mkdir()
    made.environment["XDG_CONFIG_HOME"] = str(made.folder / "config")
    made.environment |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mca_base_env_list": "XDG_CONFIG_HOME",
    }
    assert made.run(PYTHON, "-m", "meshlib._cli", "secret")[0] == 0
    for name, text in (("hello.py", HELLO), ("saves.py", SAVES)):
        (made.folder / name).write_text(textwrap.dedent(text))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _empty(slurm: SlurmCluster) -> Iterator[None]:
    yield
    slurm.wait_until_empty()
    for file in slurm.folder.glob("saved.*"):
        file.unlink()


def check_world(out: str, size: int) -> None:
    found = re.findall(r"rank (\d+)/(\d+) local \d+ sum (\d+);", out)  # mpirun may mix lines
    total = size * (size + 1) // 2
    assert sorted(found) == [(str(rank), str(size), str(total)) for rank in range(size)], out


def batch(slurm: SlurmCluster, script: str, *flags: str) -> str:
    """Run a batch script to its end and return what it printed."""
    (slurm.folder / "batch.sh").write_text(f"#!/bin/sh\n{textwrap.dedent(script)}")
    code, said = slurm.run("sbatch", "-W", "-N2", "-n4", "-o", "batch.out", *flags, "batch.sh")
    out = (slurm.folder / "batch.out").read_text()
    assert code == 0, said + out
    return out


def test_srun_python(slurm: SlurmCluster) -> None:
    code, out = slurm.run("srun", "-N2", "-n4", PYTHON, "hello.py")
    assert code == 0, out
    check_world(out, 4)


def test_srun_python_with_slurms_pmi2(slurm: SlurmCluster) -> None:
    code, out = slurm.run("srun", "-N2", "-n3", "--mpi=pmi2", PYTHON, "hello.py")
    assert code == 0, out
    check_world(out, 3)


def test_srun_python_without_a_secret(slurm: SlurmCluster) -> None:
    code, out = slurm.run("srun", "-N2", "-n4", PYTHON, "hello.py", XDG_CONFIG_HOME="/nowhere")
    assert code != 0
    assert "Run `meshlib secret` once" in out
    assert "rank 0/" not in out


def test_srun_meshrun_without_flags(slurm: SlurmCluster) -> None:
    code, out = slurm.run("srun", "-N2", "--ntasks-per-node=1", MESHRUN, "-v", "hello.py")
    assert code == 0, out
    check_world(out, 2)
    first = slurm.hosts[0]
    for node in range(2):
        said = rf"options from Slurm: --nnodes 2 --rdzv-id slurm-\d+\.0 --master-addr {first}"
        assert re.search(rf"{said} --master-port \d+ --node-rank {node}\n", out), out


def test_srun_meshrun_with_ranks(slurm: SlurmCluster) -> None:
    """This was two worlds of two, each with the wrong sum."""
    command = ("srun", "-N2", "--ntasks-per-node=1", MESHRUN, "--nproc-per-node", "2", "hello.py")
    code, out = slurm.run(*command)
    assert code == 0, out
    check_world(out, 4)


def test_several_launchers_a_node_are_refused(slurm: SlurmCluster) -> None:
    code, out = slurm.run("srun", "-N2", "-n4", MESHRUN, "hello.py")
    assert code != 0
    assert "srun has started 4 tasks on 2 nodes" in out
    assert "rank 0/" not in out


def test_a_batch_script_is_no_rank(slurm: SlurmCluster) -> None:
    script = f"""
        {PYTHON} hello.py && exit 1
        {MESHRUN} hello.py && exit 1
        echo ---
        srun {PYTHON} hello.py
    """
    before, _, after = batch(slurm, script).partition("---")
    assert "A batch script, a shell in an allocation and an ssh session are not ranks" in before
    assert "has 2 nodes, and meshrun was not started by srun on each of them" in before
    assert "rank 0/" not in before
    check_world(after, 4)


def test_open_mpi_in_an_allocation(slurm: SlurmCluster) -> None:
    """Two of four made a world of two, and printed a wrong sum and success."""
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("needs Open MPI (Debian: openmpi-bin)")
    command = ("mpirun.openmpi", "-n", "4", PYTHON, "hello.py")
    code, out = slurm.run("salloc", "-N2", "-n4", *command)
    assert code == 0, out
    check_world(out, 4)


def test_open_mpi_starts_launchers(slurm: SlurmCluster) -> None:
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("needs Open MPI (Debian: openmpi-bin)")
    command = ("mpirun.openmpi", "--map-by", "ppr:1:node", MESHRUN, "--nproc-per-node=2")
    code, out = slurm.run("salloc", "-N2", "-n4", *command, "hello.py")
    assert code == 0, out
    check_world(out, 4)


def test_mpichs_hydra_in_a_batch_script(slurm: SlurmCluster) -> None:
    if shutil.which("mpirun.mpich") is None:
        pytest.skip("needs MPICH (Debian: mpich)")
    check_world(batch(slurm, f"timeout 60 mpirun.mpich -n 4 {PYTHON} hello.py"), 4)


ATTACH = """
    import re, sys
    from pathlib import Path
    import meshlib as dist
    from meshlib.notebook import attach

    said = Path("launchers.err").read_text()
    host, port = re.search(r"--master-addr (\\S+) --master-port (\\d+)", said).groups()
    with attach(f"{host}:{port}") as ranks:
        print("found", ranks.run(lambda: (dist.get_rank(), dist.get_world_size())), flush=True)
"""


def test_a_notebook_attaches_to_ranks_under_slurm(slurm: SlurmCluster) -> None:
    (slurm.folder / "attach.py").write_text(textwrap.dedent(ATTACH))
    out = batch(
        slurm,
        f"""
        timeout 50 srun --overlap -N2 -n2 --ntasks-per-node=1 \\
            {MESHRUN} -v -n 2 -m meshlib.notebook > launchers.err 2>&1 &
        for i in 1 2 3 4 5 6 7 8 9 10; do grep -q master-port launchers.err || sleep 1; done
        timeout 30 srun --overlap -N1 -n1 {PYTHON} attach.py
        cat launchers.err
        kill $!
        exit 0
        """,
    )
    assert "found {0: (0, 4), 1: (1, 4), 2: (2, 4), 3: (3, 4)}" in out


def read_until_ready(job, ranks: int) -> list[str]:
    lines = []
    while len([line for line in lines if line.startswith("ready")]) < ranks:
        line = job.stdout.readline()
        assert line, f"it ended before it was ready: {lines}"
        lines.append(line)
    return lines


def test_a_killed_launcher_is_named_by_the_other_node(slurm: SlurmCluster) -> None:
    command = ("srun", "-N2", "--ntasks-per-node=1", "--kill-on-bad-exit=0")
    job = slurm.start(*command, MESHRUN, "--nproc-per-node=2", "saves.py")
    read_until_ready(job, 4)
    (number,) = slurm.job_ids()
    code, said = slurm.run("scontrol", "listpids", number, slurm.hosts[1])
    victim = launcher_on(slurm.hosts[1])
    os.kill(victim, signal.SIGKILL)
    out, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    lost = rf"meshrun: node 1 \({slurm.hosts[1]}\) was lost: its connection to the store broke"
    assert re.search(lost, out), (out, code, said)


def launcher_on(host: str) -> int:
    """Return the process id of the only meshrun whose node Slurm calls ``host``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        here = f"SLURMD_NODENAME={host}".encode() in variables
        if here and MESHRUN.encode() in words and b"RANK=0" not in variables:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            name = Path("/proc", parent, "comm").read_text()
            if "slurmstepd" in name:
                found.append(int(entry.name))
    (pid,) = found
    return pid


@pytest.mark.parametrize("launcher", ["python", "meshrun"])
@pytest.mark.parametrize("how", ["scancel", "signals"])
def test_told_to_end_ranks_hear_it_once_and_save(
    slurm: SlurmCluster, launcher: str, how: str
) -> None:
    """``scancel`` sends SIGTERM to every process, and SIGKILL after KillWait; before a time limit
    ``--signal`` does what ``scancel --signal`` does here.
    """
    if launcher == "python":
        job = slurm.start("srun", "-N2", "-n4", PYTHON, "saves.py")
    else:
        command = ("srun", "-N2", "--ntasks-per-node=1", MESHRUN, "--nproc-per-node=2")
        job = slurm.start(*command, "saves.py")
    read_until_ready(job, 4)
    (number,) = slurm.job_ids()
    if how == "signals":
        slurm.run("scancel", "--signal=USR1", number)
        time.sleep(0.5)
        slurm.run("scancel", "--signal=TERM", number)
    else:
        slurm.run("scancel", number)
    out, _ = job.communicate(timeout=60)
    saved = sorted(file.read_text() for file in slurm.folder.glob("saved.*"))
    assert saved == [f"1 {int(how == 'signals')}"] * 4, out


def wait_for(
    slurm: SlurmCluster, job: str, output: Path, text: str, *, requeued: bool = False
) -> None:
    """Wait until ``job`` has written ``text`` to ``output``.

    Slurm would let one that it requeues begin after two minutes only.
    """
    until = time.monotonic() + 150
    pending = 0.0
    while not (output.exists() and text in output.read_text()):
        assert time.monotonic() < until, slurm.run("scontrol", "show", "job", job)[1]
        # Not while what it was before still ends: it would begin, and fail, at that moment.
        # Nor in the second in which that was killed, to which slurmd rounds: "Job already killed".
        if requeued and "PENDING" in slurm.run("squeue", "-h", "-j", job, "-o", "%T")[1]:
            pending = pending or time.monotonic()
            if time.monotonic() > pending + 2:
                slurm.run("scontrol", "update", f"job={job}", "StartTime=now")
        time.sleep(0.3)


ELASTIC = (PROGRAMS / "elastic.py").read_text()


def test_a_requeued_node_comes_to_the_others(slurm: SlurmCluster) -> None:
    """Each node is a job of its own, and one of them is requeued."""
    (slurm.folder / "elastic.py").write_text(textwrap.dedent(ELASTIC))
    jobs = []
    for node, host in enumerate(slurm.hosts):
        script = f"""
            srun -n1 {MESHRUN} --nnodes 2 --rdzv-endpoint {slurm.hosts[0]}:29613 \\
                --rdzv-id mine --replace 1 elastic.py
        """
        (slurm.folder / "node.sh").write_text(f"#!/bin/sh\n{textwrap.dedent(script)}")
        flags = ("--requeue", "--open-mode=append", "-N1", "-n1", "-w", host)
        submit = ("sbatch", "--parsable", *flags, "-o", f"elastic.{node}", "node.sh")
        jobs.append(slurm.run(*submit)[1].strip())
    outputs = [slurm.folder / f"elastic.{node}" for node in range(2)]
    wait_for(slurm, jobs[1], outputs[1], "lose me")
    assert slurm.run("scontrol", "requeue", jobs[1])[0] == 0
    wait_for(slurm, jobs[1], outputs[1], "rank 2 of [0, 2]: 42", requeued=True)
    slurm.wait_until_empty()
    assert "rank 0 of [0, 2]: 42" in outputs[0].read_text()


def test_a_requeued_job_meets_again_under_another_name(slurm: SlurmCluster) -> None:
    script = f"""
        if [ -z "$SLURM_RESTART_COUNT" ]; then echo first; sleep 600; exit 1; fi
        srun --ntasks-per-node=1 -n2 {MESHRUN} -v hello.py
    """
    (slurm.folder / "batch.sh").write_text(f"#!/bin/sh\n{textwrap.dedent(script)}")
    flags = ("--requeue", "--open-mode=append", "-N2", "-n4", "-o", "requeue.out")
    job = slurm.run("sbatch", "--parsable", *flags, "batch.sh")[1].strip()
    output = slurm.folder / "requeue.out"
    wait_for(slurm, job, output, "first")
    assert slurm.run("scontrol", "requeue", job)[0] == 0
    wait_for(slurm, job, output, "rank 1/2", requeued=True)
    out = output.read_text()
    check_world(out, 2)
    assert f"the engine has restarted this job 1 times: its name is slurm-{job}.0~1" in out
