"""Programs on a Python that lacks what macOS lacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MESHRUN = str(Path(sys.executable).with_name("meshrun"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE)}
SECONDS = 120

pytestmark = pytest.mark.processes

COLLECTIVES = """
import numpy as np
import meshlib as dist

dist.init_process_group()
rank = dist.get_rank()
print("sum", dist.all_reduce(np.array([1, rank])))
if rank == 0:
    dist.send(np.ones(300_000), dst=1)
else:
    values = np.zeros(300_000)
    dist.recv(values, src=0)
    print("received", values.sum())
dist.destroy_process_group()
"""

REMOTE = """
import os
from meshlib import rpc

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
if rank == 0:
    futures = [rpc.rpc_async("worker1", pow, args=(2, i)) for i in range(40)]
    print("powers", sum(future.wait() for future in futures) == 2**40 - 1)
rpc.shutdown()
"""

CHECKPOINT = """
import sys
import numpy as np
import meshlib as dist
from meshlib import checkpoint

mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
checkpoint.save(sys.argv[1], {"w": np.arange(4.0)}, step=1, group=mesh.get_group())
state = checkpoint.load(sys.argv[1], {"w": np.zeros(4)}, group=mesh.get_group())
print("loaded", state["w"])
dist.destroy_process_group()
"""

SPAWNED = """
import numpy as np
import meshlib as dist

def main(rank):
    dist.init_process_group()
    print(f"sum {dist.all_reduce(np.ones(2))}\\n", end="", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    dist.spawn(main, nprocs=2)
"""

SLEEPING = """
import os, sys, time
import meshlib as dist

dist.init_process_group()
print("here", os.getpid(), flush=True)
dist.barrier()
time.sleep(100)
"""


def run(tmp_path: Path, program: str, *args: str, launcher: tuple[str, ...]) -> str:
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [*launcher, str(script), *args],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_are_gone() -> None:
    """Else the other tests would prove nothing."""
    asked = (
        "import os, select, sys;"
        "print(sys.platform, hasattr(os, 'eventfd'), hasattr(select, 'epoll'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["darwin", "False", "False"]


def test_collectives_and_messages(tmp_path: Path) -> None:
    output = run(tmp_path, COLLECTIVES, launcher=(MESHRUN, "--nproc-per-node", "2"))
    assert output.count("sum [2 1]") == 2
    assert "received 300000.0" in output


def test_remote_calls(tmp_path: Path) -> None:
    assert "powers True" in run(tmp_path, REMOTE, launcher=(MESHRUN, "--nproc-per-node", "2"))


def test_a_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    output = run(tmp_path, CHECKPOINT, path, launcher=(MESHRUN, "--nproc-per-node", "2"))
    assert output.count("loaded [0. 1. 2. 3.]") == 2


def test_spawn(tmp_path: Path) -> None:
    assert run(tmp_path, SPAWNED, launcher=(sys.executable,)).count("sum [2. 2.]") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_launcher(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "program.py"
    script.write_text(SLEEPING)
    job = subprocess.Popen(
        [MESHRUN, "--nproc-per-node", "2", str(script)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with job:
        assert job.stdout is not None
        ranks = [int(job.stdout.readline().split()[-1]) for _ in range(2)]
        job.send_signal(number)
        job.wait(SECONDS)
        end = time.monotonic() + SECONDS
        while any(_runs(pid) for pid in ranks):
            assert time.monotonic() < end, "a rank has outlived its launcher"
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")
