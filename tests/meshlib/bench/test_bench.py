"""The benchmark measures what it says, notices wrong results, and leaves nothing behind."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshlib._bench.cases import CASES, COLLECTIVES, ROOT, Floats
from meshlib._bench.cli import main
from meshlib._bench.jobs import job as job_module
from meshlib._bench.jobs.job import BenchmarkError, LibraryJob, Repetitions, running_job
from meshlib._bench.libraries import LIBRARIES, environments
from meshlib._bench.libraries.c10d import bind_c10d
from meshlib._bench.libraries.environments import python_of
from meshlib._bench.plot import check_can_plot, plot
from meshlib._bench.report import copy_bandwidth, header, ratio, references, rows
from meshlib._bench.run import (
    BenchmarkPlan,
    CaseResult,
    Cell,
    Contender,
    Skipped,
    WrongResultError,
    _measure,
    grid,
)
from meshlib._bench.sizes import format_size, parse_size
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


def _empty(count: int, most: int) -> Floats:
    assert count <= most
    return np.empty(count, np.float32)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("size", [2, 3])
def test_each_case_is_right_and_again_after_reset(name: str, size: int) -> None:
    def body() -> None:
        import meshlib as dist

        case = CASES[name](1000, dist.get_rank(), size, _empty)
        call = bind_c10d(dist, case, lambda array: array)
        for _ in range(2):
            case.reset()
            call()
            assert case.is_right(case.output)

    run_ranks(body, size)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"barrier"}))
def test_no_call_and_a_single_wrong_value_are_found_out(name: str) -> None:
    found = 0
    for rank in range(2):
        case = CASES[name](300_000, rank, 2, _empty)  # longer than a tile
        expected = case.expected()
        if expected is None or (name == "broadcast" and rank == ROOT):
            continue
        assert not case.is_right(case.output)
        case.output[:] = np.concatenate(
            [
                np.arange(r.position, r.position + r.count) % 251 * r.scale + r.shift
                for r in expected
            ]
        )
        assert case.is_right(case.output)
        case.output[-1] += 1
        assert not case.is_right(case.output)
        found += 1
    assert found


def test_bandwidths_are_those_of_nccl_tests() -> None:
    # 4 ranks, 1000 bytes, a microsecond: S and factor as in nccl-tests' PERFORMANCE.md.
    expected = {
        "all_reduce": (1.0, 1.5),
        "broadcast": (1.0, 1.0),
        "reduce": (1.0, 1.0),
        "all_gather": (4.0, 3.0),
        "gather": (4.0, 3.0),
        "reduce_scatter": (1.0, 0.75),
        "scatter": (1.0, 0.75),
        "all_to_all": (1.0, 0.75),
        "ping_pong": (2.0, 2.0),
    }
    for case, (algorithm, bus) in expected.items():
        result = CaseResult(case, 1000, 4, "meshlib", "", [[1e-6]])
        assert result.algorithm_bandwidth == pytest.approx(algorithm * 1e9)
        assert result.bus_bandwidth == pytest.approx(bus * 1e9)


def test_bytes_moved_are_each_input_and_each_result_once() -> None:
    for name in set(COLLECTIVES) - {"barrier", "ping_pong", "broadcast"}:
        cases = [CASES[name](4800, rank, 3, _empty) for rank in range(3)]
        read = sum(case.input.nbytes for case in cases)
        written = sum(case.output.nbytes for case in cases if case.expected() is not None)
        assert CASES[name].moved(4800, 3) == read + written, name
    assert CASES["broadcast"].moved(4800, 3) == (1 + 2) * 4800  # one reads, two write


def test_the_median_is_of_rounds_and_ratios_are_of_medians() -> None:
    # Two slow rounds of five calls weigh no more than three quick ones of one.
    own = CaseResult(
        "all_reduce", 8, 2, "meshlib", "", [[9.0] * 5, [1e-5], [2e-5], [2e-5], [9.0] * 5]
    )
    gloo = CaseResult("all_reduce", 8, 2, "gloo", "", [[1e-4, 8e-5, 5e-5]])
    openmpi = CaseResult("all_reduce", 8, 2, "openmpi", "", [[1e-5]])
    mpich = CaseResult("all_reduce", 8, 2, "mpich", "", [[4e-5]])
    results, names = [own, gloo, openmpi, mpich], ["meshlib", "gloo", "openmpi", "mpich"]
    assert [ratio(results, "meshlib", name) for name in references(names)] == pytest.approx(
        [0.25, 2.0, 0.5, 2.0]
    )
    assert ratio([own, gloo], "meshlib", "best MPI") is None
    assert header(names).endswith("/ gloo  / openmpi    / mpich / best MPI")
    lines = rows(results, names, None).splitlines()
    assert lines[0].split()[:5] == ["all_reduce", "2", "8", "B", "meshlib"]
    assert lines[0].split()[-4:] == ["0.25", "2.00", "0.50", "2.00"]
    assert lines[1].split() == ["gloo", "80.0", "0.000", "0.000"]


class _Answering(LibraryJob):
    """Answers what ``block(repetitions, calls)`` returns."""

    def __init__(self, library: str, block: Callable[[int, int], Repetitions]) -> None:
        self.library, self.block = library, block

    def measure(
        self, case: str, nbytes: int, repetitions: int, warmup: int, **_: bool
    ) -> Repetitions:
        return self.block(repetitions, repetitions + warmup)


def test_a_turn_has_as_many_calls_as_fit_once_the_ranks_are_connected() -> None:
    turns = iter([0.3, 0.002])

    def connecting(repetitions: int, calls: int) -> Repetitions:
        return Repetitions([[1e-4]] * repetitions, [], True, calls * next(turns), Counter())

    contender = Contender(_Answering("meshlib", connecting), "")
    contender.probe("all_reduce", 8, keep=True)
    assert contender.repetitions(rounds=3, turn=0.05) == (25, 2)


def test_a_peers_wrong_result_is_told_and_ours_ends_the_run() -> None:
    def job(library: str, wrong_from: int) -> LibraryJob:
        numbers = itertools.count(1)

        def block(repetitions: int, _: int) -> Repetitions:
            right = next(numbers) < wrong_from
            return Repetitions([[1e-4]] * repetitions, [], right, 1e-3, Counter())

        return _Answering(library, block)

    def measured(ours: int, theirs: int) -> list[list[CaseResult] | Skipped]:
        cell = Cell("all_reduce", 8, 2, ("meshlib", "gloo"))
        jobs = [job("meshlib", ours), job("gloo", theirs)]
        return list(
            _measure(BenchmarkPlan([cell], {}, 3), cell, [Contender(one, "") for one in jobs])
        )

    never = 100
    for theirs in (1, 4):  # at once, or in a round
        error, results = measured(never, theirs)
        assert isinstance(results, list)
        wrong = "gloo: all_reduce of 8 bytes returned a wrong result"
        assert str(error).endswith(f"not measured: {wrong}")
        assert [(result.library, len(result.rounds)) for result in results] == [("meshlib", 3)]
    with pytest.raises(WrongResultError, match="meshlib: all_reduce of 8 bytes"):
        measured(4, never)


def test_the_share_of_the_memory_is_that_of_bytes_moved() -> None:
    copied = CaseResult("copy", 64 << 20, 2, "meshlib", "", [[0.02]])
    reduced = CaseResult("all_reduce", 64 << 20, 2, "meshlib", "", [[0.04]])
    memory = copy_bandwidth([copied, reduced], 2)
    assert memory == (4 * 64 << 20) / 0.02
    assert "50%" in rows([reduced], ["meshlib"], memory)
    assert copy_bandwidth([reduced], 2) is None


def test_a_grid_measures_the_memory_before_large_cells() -> None:
    small = grid(["all_reduce", "barrier"], [8, 64], [2], ["meshlib", "openmpi"])
    assert [(cell.case, cell.nbytes) for cell in small] == [
        ("all_reduce", 8),
        ("all_reduce", 64),
        ("barrier", 0),
    ]
    assert all(cell.libraries == ("meshlib", "openmpi") for cell in small)
    large = grid(["reduce"], [1 << 20], [2, 4], ["meshlib", "jax"])
    assert [(cell.case, cell.ranks) for cell in large] == [
        ("copy", 2),
        ("reduce", 2),
        ("copy", 4),
        ("reduce", 4),
    ]
    assert all(cell.libraries == ("meshlib",) for cell in large)  # JAX has no reduce


@pytest.mark.processes
def test_a_run_prints_a_table_and_writes_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "out" / "bench.json"
    arguments = ["--collectives", "all", "--sizes", "100K", "--ranks", "2", "--rounds", "1"]
    assert main([*arguments, "--symmetric", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * len(COLLECTIVES)
    report = json.loads(file.read_text())
    assert report["machine"]["cores"] >= 1
    assert report["settings"]["rounds"] == "1"
    assert {result["case"] for result in report["results"]} == set(COLLECTIVES)
    assert {result["library"] for result in report["results"]} == {"meshlib", "meshlib-symmetric"}
    for result in report["results"]:
        assert result["repetitions"] >= 1
        assert 0 < result["after_last_us"] <= result["ninth_tenth_us"]
        assert 0 < result["tenth_us"] <= result["median_us"] <= result["ninth_tenth_us"]


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.png"
    plot(
        [
            CaseResult("all_reduce", nbytes, 2, library, "", [[1e-9 * nbytes]])
            for nbytes in (8, 1 << 20)
            for library in ("meshlib", "gloo")
        ],
        file,
    )
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"expected a .png, .svg or .pdf file, got 'x.gif'"):
        check_can_plot(Path("x.gif"))


@pytest.mark.processes
@pytest.mark.parametrize("peer", ["openmpi", "mpich", "jax"])  # Gloo's calls are named as ours are
def test_a_peer_that_is_installed_gives_right_results(peer: str) -> None:
    if not environments.is_set_up(peer):
        pytest.skip(f"{peer} is not set up")
    with running_job(peer, python_of(peer), 2) as job:
        job.start()
        for case in LIBRARIES[peer].cases or COLLECTIVES:
            assert job.measure(case, 1000, 2, 1).right, case
    _none_is_left(job)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "8,x"], "size must be like 8, 64K, 1M or 1G, got 'x'"),
        (["--ranks", "1"], "at least 2 ranks"),
        (["--ranks", "two"], "'two'"),
        (["--rounds", "0"], "at least 1"),
        (["--collectives", "all_reduce,gathr"], "'gathr' is unknown; expected all_reduce"),
        (["--vs", "nccl"], "'nccl' is unknown; expected gloo, openmpi, mpich, jax"),
        (["--backend", "pigeon"], "'pigeon' is unknown; expected auto, shm, tcp"),
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
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    assert main(["--vs", "gloo"]) == 2  # nothing is left to compare with
    assert "setup_peers gloo" in capsys.readouterr().err


def _exit_codes(job: LibraryJob) -> list[int | None]:
    return [process.returncode for process in job.processes.started]


def _none_is_left(job: LibraryJob) -> None:
    assert None not in _exit_codes(job)
    for pid in job.processes.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.processes
def test_a_worker_that_fails_is_reported_with_what_it_printed() -> None:
    # An interpreter without the library: the worker ends with an ImportError.
    with (
        pytest.raises(BenchmarkError, match=r"gloo, 2 ranks: rank \d has ended(.|\n)*torch"),
        running_job("gloo", sys.executable, 2) as job,
    ):
        job.start()
    _none_is_left(job)


@pytest.mark.processes
def test_a_worker_that_is_stuck_ends_some_time_after_its_driver() -> None:
    program = (
        "import threading; from meshlib._bench import worker; worker._LEAVE_SECONDS = 0.01;"
        "threading.Thread(target=worker._end_with_driver, daemon=True).start();"
        "threading.Event().wait(90)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 1


@pytest.mark.processes
def test_a_worker_that_is_stuck_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(job_module, "_MEASURE_SECONDS", 0.2)
    job = LibraryJob("meshlib", sys.executable, 2, tmp_path)
    try:
        job.start()
        with pytest.raises(BenchmarkError, match=r"no answer from ranks \[0, 1\] in 0.2 s"):
            job.measure("all_reduce", 8, 10_000_000, 0)
    finally:
        job.end(orderly=False)
    assert _exit_codes(job) == [-9, -9]


@pytest.mark.processes
def test_a_job_that_ends_well_leaves_by_itself() -> None:
    with running_job("meshlib", sys.executable, 2) as job:
        assert job.start().startswith("meshlib")
        assert len(job.measure("all_reduce", 8, 4, 1).seconds) == 4
    assert _exit_codes(job) == [0, 0]
