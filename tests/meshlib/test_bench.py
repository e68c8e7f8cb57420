"""The benchmark measures what it says, notices wrong results, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshlib.bench import job as job_module
from meshlib.bench import setup_peers
from meshlib.bench.cases import CASES
from meshlib.bench.cli import main
from meshlib.bench.job import BenchmarkError, Job, running_job
from meshlib.bench.report import header, row
from meshlib.bench.run import Result
from meshlib.bench.sizes import format_size, parse_size
from meshlib.testing import run_ranks


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("64K", 65536), ("1 MiB", 1 << 20), ("2g", 2 << 30), ("0", 0)]
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "K", "1.5M", "-8", "8 apples"])
def test_wrong_sizes_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="size must be like"):
        parse_size(text)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_each_case_is_right_and_again_after_reset(name: str, size: int) -> None:
    def body() -> None:
        import meshlib as dist

        case = CASES[name](1000, dist.get_rank(), size, lambda array: array)
        for _ in range(2):
            case.reset()
            case.run(dist)
            assert case.is_right()

    run_ranks(body, size)


class _Idle:
    """A library whose calls do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.mark.parametrize("name", sorted(set(CASES) - {"barrier", "ping_pong"}))
def test_a_library_that_does_nothing_is_found_out(name: str) -> None:
    case = CASES[name](1000, 1, 2, lambda array: array)
    case.reset()
    case.run(_Idle())
    assert not case.is_right()


@pytest.mark.parametrize("name", sorted(set(CASES) - {"barrier"}))
def test_a_single_wrong_value_is_found_out(name: str) -> None:
    case = CASES[name](1000, 1, 2, lambda array: array)
    np.copyto(case.output, case.expected())
    assert case.is_right()
    case.output[-1] += 1
    assert not case.is_right()


@pytest.mark.processes
def test_a_run_prints_a_table_and_writes_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "out" / "bench.json"
    arguments = ["--collectives", "all", "--sizes", "8,100K", "--ranks", "2", "--rounds", "1"]
    assert main([*arguments, "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * (len(CASES) - 1) + 1  # a barrier has no size
    report = json.loads(file.read_text())
    assert report["machine"]["cores"] >= 1
    assert report["settings"]["rounds"] == "1"
    assert {result["case"] for result in report["results"]} == set(CASES)
    for result in report["results"]:
        assert result["right"]
        assert result["library"] == "meshlib"
        assert result["repetitions"] >= 3
        assert 0 < result["tenth_us"] <= result["median_us"] <= result["ninth_tenth_us"]


def test_ratios_are_of_medians() -> None:
    own = Result("all_reduce", 8, 2, "meshlib", "", seconds=[1e-5, 2e-5, 9.0])
    peer = Result("all_reduce", 8, 2, "gloo", "", seconds=[1e-4, 8e-5, 5e-5])
    assert header(["meshlib", "gloo"]).split()[-2:] == ["/", "gloo"]
    assert row([own, peer]).split() == ["all_reduce", "2", "8", "B", "20.0", "80.0", "0.25"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "8,x"], "size must be like 8, 64K, 1M or 1G, got 'x'"),
        (["--ranks", "1"], "at least 2 ranks"),
        (["--ranks", "two"], "'two'"),
        (["--rounds", "0"], "at least 1"),
        (["--collectives", "all_reduce,gathr"], "'gathr' is unknown; expected all_reduce"),
        (["--vs", "nccl"], "'nccl' is unknown; expected gloo"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_peer_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup_peers, "FOLDER", tmp_path)
    assert main(["--vs", "gloo"]) == 2
    assert "setup_peers gloo" in capsys.readouterr().err


def _processes(job: Job) -> list[subprocess.Popen[bytes]]:
    return job._workers


@pytest.mark.processes
def test_a_worker_that_fails_is_reported_with_what_it_printed() -> None:
    # An interpreter without the library: the worker ends with an ImportError.
    with (
        pytest.raises(BenchmarkError, match=r"gloo, 2 ranks: rank \d has ended(.|\n)*torch"),
        running_job("gloo", sys.executable, 2) as job,
    ):
        job.start()
    assert all(process.returncode is not None for process in _processes(job))


@pytest.mark.processes
def test_a_worker_that_is_stuck_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(job_module, "_MEASURE_SECONDS", 0.2)
    job = Job("meshlib", sys.executable, 2, tmp_path / "errors.txt")
    try:
        job.start()
        with pytest.raises(BenchmarkError, match=r"no answer from ranks \[0, 1\] in 0.2 s"):
            job.measure("all_reduce", 8, 10_000_000, 0)
    finally:
        job.end(orderly=False)
    assert all(process.returncode == -9 for process in _processes(job))


@pytest.mark.processes
def test_a_job_that_ends_well_leaves_by_itself() -> None:
    with running_job("meshlib", sys.executable, 2) as job:
        assert job.start().startswith("meshlib")
        assert len(job.measure("all_reduce", 8, 4, 1).seconds) == 4
    assert all(process.returncode == 0 for process in _processes(job))
