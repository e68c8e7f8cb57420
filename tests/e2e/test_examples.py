"""Every example runs under ``meshrun``, with real processes, and says what it should."""

import os
import random
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from meshlib.checkpoint import latest_step

EXAMPLES = Path(__file__).parents[2] / "examples"
MESHRUN = Path(sys.executable).with_name("meshrun")
DEADLINE = 100.0

pytestmark = pytest.mark.processes


# Ranks that are processes need no more threads than XLA takes by itself.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "NPROC"}


def meshrun(cwd, *arguments, code=0):
    """Run the launcher in ``cwd``; check how it ended, and return what rank 0 printed."""
    done = subprocess.run(
        [MESHRUN, *map(str, arguments)],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def shortened(directory, example="digits_2d", **settings):
    """Write a 2-D example's config with other settings; return the new file's path."""
    text = (EXAMPLES / f"{example}.toml").read_text()
    for name, value in settings.items():
        text, count = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value}  ", text, flags=re.M)
        assert count == 1, name
    path = directory / "short.toml"
    path.write_text(text)
    tables = [table for table in tomllib.loads(text).values() if isinstance(table, dict)]
    assert {
        key: value for table in tables for key, value in table.items()
    }.items() >= settings.items()
    return path


def test_digits_2d(tmp_path):
    config = shortened(tmp_path, epochs=12)
    out = meshrun(tmp_path, "--mesh", config, EXAMPLES / "digits_2d.py", "--config", config)
    accuracy = re.search(r"test accuracy (\d+\.\d)% \(\d+ of 360\)", out)
    assert accuracy, out
    assert float(accuracy[1]) >= 95
    assert re.search(
        r"mesh dp=2 × tp=2 and one process agree within 1e-5 in every parameter after 264 steps",
        out,
    ), out
    picture = tmp_path / "out" / "digits_2d.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "short.toml"]
    last = re.findall(r"^(.*): 264 of 264, loss (\d\.\d+), \d+ s$", out, re.M)
    assert [title for title, _ in last] == ["dp=2 × tp=2", "one process"], out
    assert last[0][1] == last[1][1]  # both of the whole batch


@pytest.mark.timeout(3 * DEADLINE)  # three runs
def test_digits_2d_cut_and_resumed_on_another_mesh(tmp_path):
    config = shortened(tmp_path, epochs=2, hidden=32)
    cut = random.randrange(9, 44)  # in either epoch; what was saved last is 1 to 8 steps old

    def run(mesh, out, *options, code=0):
        program = [EXAMPLES / "digits_2d.py", "--config", config, "--out", out]
        meshrun(tmp_path, "--mesh", mesh, *program, *options, code=code)

    run("dp=4", "uncut")
    saving = ["--checkpoints", "checkpoints", "--save-every", 8]
    run("dp=4", "cut", *saving, "--stop-after", cut, code=1)
    assert not (tmp_path / "cut").exists()
    assert latest_step(tmp_path / "checkpoints") == cut // 8 * 8
    run("dp=2,tp=2", "resumed", *saving)
    uncut, resumed = (np.loadtxt(tmp_path / out / "losses.txt") for out in ("uncut", "resumed"))
    assert len(uncut) == 44
    np.testing.assert_allclose(resumed, uncut, rtol=0, atol=1e-9, err_msg=f"cut after {cut}")


@pytest.mark.parametrize("mesh", ["tp=2", "dp_replicate=1,dp_shard=2"])
def test_digits_2d_on_another_mesh(tmp_path, mesh):
    config = shortened(tmp_path, epochs=1)
    out = meshrun(tmp_path, "--mesh", mesh, EXAMPLES / "digits_2d.py", "--config", config)
    assert "one process agree within 1e-5 in every parameter after 22 steps" in out


def test_a_mistake_in_the_config_is_named_with_file_and_key(tmp_path):
    config = shortened(tmp_path, batch_size=63)
    done = subprocess.run(
        [MESHRUN, "--mesh", "dp=2", EXAMPLES / "digits_2d.py", "--config", config],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(
        f"{config}: [train] batch_size is 63, which is not divisible by 2 replicas"
    )


def test_ddp_digits(tmp_path):
    arguments = ("--mesh", "dp=2", EXAMPLES / "ddp_digits.py", "--epochs", 8)
    out = meshrun(tmp_path, *arguments)
    losses = [float(value) for value in re.findall(r"epoch +\d+: loss (\d\.\d+)", out)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 4
    accuracy = re.search(r"test accuracy (\d+\.\d)% on 2 ranks", out)
    assert accuracy, out
    assert float(accuracy[1]) >= 90


def test_mesh_tour(tmp_path):
    out = meshrun(tmp_path, "--mesh", "dp=2,tp=2", EXAMPLES / "mesh_tour.py")
    for line in (
        "mesh.shape = (2, 2)",
        "mesh['all'].size() = 4",
        "mesh.all_reduce(np.array([1.0]), op=dist.ReduceOp.SUM) = array([4.])",
        "work.result() = array([10])",
        "inner = 'tp'",
        "dist.get_world_size(mesh[inner]) = 2",
    ):
        assert f"\n{line}\n" in f"\n{out}\n"
    per_rank = "mesh[inner].all_reduce(np.array([rank]))\n" + "".join(
        f"    rank {rank}: array([{value}])\n" for rank, value in enumerate([1, 1, 5, 5])
    )
    assert per_rank in out


def test_one_rank(tmp_path):
    out = subprocess.run(
        [sys.executable, EXAMPLES / "one_rank.py", "--rank", "17", "--layers", "3"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    ).stdout
    assert out.startswith("rank 17 of 4096, at [0, 2, 1] of ")
    counts = {tuple(line.split()[:2]): line.split()[2:4] for line in out.splitlines()[2:-1]}
    # Of each layer 1/8, 65,920 parameters of 4 bytes; an output and its gradient of (8, 256).
    layer = 65_920 * 4 / 1e6
    assert counts == {
        ("all_gather", "dp_shard"): ["6", f"{2 * 3 * layer:.3f}"],
        ("reduce_scatter", "dp_shard"): ["3", f"{3 * layer:.3f}"],
        ("all_reduce", "dp_replicate"): ["3", f"{3 * layer / 32:.3f}"],
        ("all_reduce", "tp"): ["6", f"{6 * 8 * 256 * 4 / 1e6:.3f}"],
    }


def test_heat_2d(tmp_path):
    args = EXAMPLES / "heat_2d.py", "--steps", 60, "--cells"
    printed = meshrun(tmp_path, "--mesh", "y=2,x=2", *args, 32)
    assert re.fullmatch(r"4096 cells: \d+\.\d+ degrees on average, \d+\.\d+ at most\n", printed)
    assert printed == meshrun(tmp_path, "--mesh", "y=1,x=1", *args, 64)


def test_work_stealing(tmp_path):
    args = EXAMPLES / "work_stealing.py", "--numbers", 3000, "--batch", 50
    printed = meshrun(tmp_path, "-n3", *args)
    assert "9000 numbers: 6171 takes the most steps, 261\n" in printed
    done = re.search(r"each rank did \[(.*?)\] of which stolen \[(.*?)\]", printed)
    assert sum(map(int, done[1].split(", "))) == 9000


def test_uneven_inputs(tmp_path):
    out = meshrun(tmp_path, "--mesh", "dp=3", EXAMPLES / "uneven_inputs.py", "--epochs", 12)
    for rank, (images, steps) in enumerate([(239, 3), (479, 7), (719, 11)]):
        assert f"rank {rank}: {images} images, {steps} steps an epoch" in out
    # All that full steps can use: 21 steps of 64 images.
    losses = [float(x) for x in re.findall(r"epoch +\d+: 1344 images, loss (\d\.\d+)", out)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 4
    accuracy = re.search(r"all 3 ranks have the same bits; test accuracy (\d+\.\d)%", out)
    assert accuracy, out
    assert float(accuracy[1]) >= 90


def test_elastic_digits(tmp_path):
    example = EXAMPLES / "elastic_digits.py"
    options = ("--mesh", "dp=3", "--replace", "1", example, "--steps", 120)
    out = meshrun(tmp_path, *options, "--lose", "1:20")
    assert "loss" in out
    accuracy = float(re.search(r"test accuracy (\S+)% after [12] changes", out)[1])
    assert accuracy > 90
