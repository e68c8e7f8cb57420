"""``meshlib tune`` and ``meshlib bench --predict``: estimates, tables, and one run of each."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshlib._bench import cli as bench
from meshlib._bench.predict import Network, comparison, cost_of, extrapolation
from meshlib._bench.run import CaseResult
from meshlib._tune import cli
from meshlib._tune.contests import CONTESTS
from meshlib._tune.estimates import best_of, crossover, fit_line
from meshlib._tune.measure import TransportBenchmark, TuningResults
from meshlib.testing import run_ranks
from transport._calls.header import Kind
from transport._choosing.choice import DEFAULT, Algorithm, Thresholds
from transport._choosing.cost import Cost
from transport._choosing.tuning import TransportTuning, Tuning
from transport._hierarchical.cost import Shape

SIZES = [1 << exponent for exponent in range(10, 20)]


@given(st.integers(0, len(SIZES)))
def test_a_clean_crossover_is_found(count: int) -> None:
    below = [1.0 if i < count else 2.0 for i in range(len(SIZES))]
    above = [1.5] * len(SIZES)
    assert crossover(SIZES, below, above) == (SIZES[count - 1] if count else 0)


@given(st.lists(st.tuples(st.floats(1e-6, 1), st.floats(1e-6, 1)), min_size=1, max_size=10))
def test_no_threshold_loses_less(times: list[tuple[float, float]]) -> None:
    sizes = SIZES[: len(times)]
    below, above = zip(*times, strict=True)

    def loss(threshold: int) -> float:
        chosen = [b if s <= threshold else a for s, b, a in zip(sizes, below, above, strict=True)]
        return sum(math.log(c / min(b, a)) for c, b, a in zip(chosen, below, above, strict=True))

    found = loss(crossover(sizes, below, above))
    assert all(found <= loss(threshold) + 1e-9 for threshold in [0, *sizes])


def test_one_noisy_size_does_not_decide() -> None:
    below = [1, 1, 1, 1.2, 1, 1, 2, 2, 2, 2]
    assert crossover(SIZES, below, [1.1] * 5 + [1.5] * 5) == SIZES[5]


@given(st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8))
def test_a_line_is_found_again(alpha: float, beta: float) -> None:
    sizes = [8, 1024, 65536, 1 << 20, 4 << 20]
    found = fit_line(sizes, [alpha + beta * size for size in sizes])
    assert found == (pytest.approx(alpha, rel=1e-6), pytest.approx(beta, rel=1e-3))


@given(st.lists(st.floats(1e-6, 1), min_size=3, max_size=3))
def test_a_line_is_never_free(seconds: list[float]) -> None:
    assert min(fit_line([1, 1000, 1_000_000], seconds)) > 0


def test_estimates_want_something_to_go_by() -> None:
    with pytest.raises(ValueError, match="one size, got 0 sizes"):
        crossover([], [], [])
    with pytest.raises(ValueError, match="got 2 sizes, 1 and 2 times"):
        crossover([1, 2], [1], [1, 2])
    with pytest.raises(ValueError, match="at least two sizes"):
        fit_line([3, 3], [1, 1])


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_estimates_want_times_that_have_passed(bad: float) -> None:
    with pytest.raises(ValueError, match=r"seconds must be times above 0, got \[1.0, "):
        fit_line([1, 2], [1.0, bad])
    with pytest.raises(ValueError, match="below must be times above 0"):
        crossover([1, 2], [1.0, bad], [1.0, 1.0])
    with pytest.raises(ValueError, match="above must be times above 0"):
        crossover([1, 2], [1.0, 1.0], [bad, 1.0])


@given(st.dictionaries(st.integers(1, 9), st.floats(0.1, 1), min_size=2), st.data())
def test_the_usual_stays_unless_another_is_clearly_better(
    seconds: dict[int, float], data: st.DataObject
) -> None:
    usual = data.draw(st.sampled_from(sorted(seconds)))
    best = best_of(seconds, usual)
    assume(best != usual)
    assert seconds[best] == min(seconds.values()) < 0.97 * seconds[usual]


def test_a_contest_is_between_two_algorithms() -> None:
    chosen = {
        Kind.ALL_REDUCE: lambda table, size: table.all_reduce(size, 4, narrow=False),
        Kind.REDUCE_SCATTER: lambda table, size: table.reduce_scatter(size, 4, narrow=False),
        Kind.ALL_GATHER: lambda table, size: table.all_gather(size, 4),
        Kind.BROADCAST: lambda table, size: table.broadcast(size, 4),
        Kind.REDUCE: lambda table, size: table.reduce(size, 8),
    }
    for contest in CONTESTS["tcp"]:
        largest = contest.sizes[-1]
        small, large = (chosen[contest.kind](t, largest) for t in (contest.below, contest.above))
        if contest.field == "star":
            assert (small, large) == (Algorithm.STAR, Algorithm.DOUBLING)
        else:
            assert small in (Algorithm.DOUBLING, Algorithm.BRUCK, Algorithm.TREE)
            assert large in (Algorithm.PAIRWISE, Algorithm.CHAIN, Algorithm.PARTS)


def test_ranks_measure_and_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshlib._tune.measure.LARGE_BYTES", 1 << 16)
    monkeypatch.setattr("meshlib._tune.measure.EXCHANGED", (8, 1 << 12, 1 << 16))
    small = tuple(
        type(contest)(contest.field, contest.kind, (1 << 10, 1 << 14), contest.least_ranks)
        for contest in CONTESTS["inproc"]
    )
    monkeypatch.setitem(CONTESTS, "inproc", small)

    def measure() -> TuningResults:
        bench = TransportBenchmark("inproc")
        return TuningResults(bench.cost(), bench.thresholds())

    found = run_ranks(measure, 4, timeout=120)
    assert len({result.thresholds for result in found}) == 1
    cost, table = found[0].cost, found[0].thresholds
    assert cost is not None
    assert min(cost.alpha, cost.beta, cost.gamma, cost.parallelism) > 0
    tried = [contest for contest in small if contest.least_ranks <= 4]
    assert {getattr(table, contest.field) for contest in tried} <= {0, 1 << 10, 1 << 14}
    assert TuningResults.unpack(found[0].pack()) == found[0]


def fake(transport: str, size: int) -> TuningResults:
    """Doubling up to a KiB a rank; a table that says who made it."""
    return TuningResults(
        Cost(1e-5 * size, 1e-9, 1e-10, 2), Thresholds(all_reduce_doubling=size << 10)
    )


def test_what_is_found_becomes_a_table() -> None:
    printed: list[str] = []
    tuning = cli.tune(["tcp", "shm"], [4, 2], fake, printed.append)
    assert printed == ["tcp, 2 ranks", "tcp, 4 ranks", "shm, 2 ranks", "shm, 4 ranks", ""]
    assert tuning.source.startswith("meshlib tune, 20")
    assert [ranks for ranks, _ in tuning.transports["tcp"].thresholds] == [2, 4]
    assert tuning.transports["tcp"].cost == Cost(2e-5, 1e-9, 1e-10, 2)
    assert tuning.transports["shm"].thresholds == ()
    text = cli.describe(tuning)
    assert "tcp: 20.0 µs a frame, 1.00 GB/s sent, 10.00 GB/s reduced, 2 at a time" in text
    assert "2 KiB (2 ranks)" in text
    assert "4 KiB (4 ranks)" in text


def test_the_command_writes_a_file_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_measure", fake)
    path = tmp_path / "tuning.json"
    assert cli.main([str(path), "--transports", "tcp", "--ranks", "2"]) == 0
    assert Tuning.decode(path.read_text(), "it").transports["tcp"].thresholds[0][0] == 2
    assert f"MESHLIB_TUNING={path}" in capsys.readouterr().out
    assert cli.main([str(tmp_path / "missing" / "file")]) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--transports", "pigeon"], "transport 'pigeon' is unknown; expected tcp, shm"),
        (["--ranks", "3"], "expected even numbers from 2 on, got 3"),
    ],
)
def test_wrong_arguments_are_one_line(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


# ---------------------------------------------------------------- predictions

TUNING = Tuning(
    "a test",
    {
        "tcp": TransportTuning(Cost(1e-5, 1e-9, 1e-10, 4), ((2, DEFAULT),)),
        "shm": TransportTuning(Cost(1e-6, 1e-10, 1e-11, 8)),
    },
)


def test_model_and_measurement_stand_side_by_side() -> None:
    small = CaseResult("all_reduce", 1 << 10, 4, "meshlib", "", [[4e-5]])
    other = CaseResult("ping_pong", 1 << 10, 2, "meshlib", "", [[1.0]])
    lines = comparison([small, other], TUNING, "tcp").splitlines()
    model = 1e6 * 3 * (2 * 1e-5 + 1024 * (2 * 1e-9 + 1e-10))
    assert lines[-1].split() == [
        *("all_reduce", "4", "1", "KiB", "star", f"{model:.1f}", "40.0", f"{model / 40:.2f}")
    ]
    assert "ping_pong" not in "\n".join(lines)


def test_a_thousand_hosts() -> None:
    network = Network(Shape(1000, 8), latency=2e-5, bandwidth=12.5e9)
    text = extrapolation(["barrier", "all_reduce", "ping_pong"], [64 << 20], TUNING, network)
    assert "1,000 hosts × 8 ranks: 20 µs a frame, 12.5 GB/s a host" in text
    barrier, reduce = (line.split() for line in text.splitlines()[-2:])
    assert barrier == ["barrier", "0", "B", "260", "202", "0.78"]  # 13 steps; 10 and 2 inside
    assert reduce[0] == "all_reduce"
    # Halving takes as few steps on one level, of which the model counts no work inside hosts.
    assert float(reduce[-1]) > 1


def test_costs_that_nobody_measured_are_asked_for() -> None:
    with pytest.raises(ValueError, match="has no cost of 'pigeon': a test; expected a file"):
        cost_of(TUNING, "pigeon")


@pytest.mark.processes
def test_bench_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--sizes", "8,64K", "--ranks", "2", "--rounds", "1", "--predict", "--hosts", "10"]
    assert bench.main(arguments) == 0
    out = capsys.readouterr().out
    assert "Model of tcp:" in out
    assert "Model of 10 hosts × 8 ranks" in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("all_reduce")] == [
        "all_reduce"
    ] * 6


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "fast"])
def test_a_network_that_is_none_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--predict", f"--network-latency={value}"])
    assert "expected a positive number" in capsys.readouterr().err
