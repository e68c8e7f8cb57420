"""``meshlib explain schedule``: the table, its bubble, and a picture."""

import sys

import pytest

from meshlib import _cli as cli
from parallel.pipeline import ActionSpan, ScheduleTable, Timing, gpipe, simulate
from parallel.pipeline._explain import draw, text


def explained(capsys, *arguments):
    code = cli.main(["explain", "schedule", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_table_with_its_bubble(capsys):
    code, out, _ = explained(capsys, "1f1b", "--stages", "2", "--microbatches", "3")
    assert code == 0
    assert out.splitlines() == [
        "1F1B: 2 stages on 2 ranks, 3 microbatches",
        "",
        "rank 0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -",
        "rank 1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .",
        "",
        "time    12; a rank computes 9 of it",
        "bubble  25.0% of the ranks' time",
        "held    activations of at most 2, 1 microbatches (of all stages) on ranks 0, 1, ...",
        "sends   3, 3 messages a step",
    ]


def test_several_stages_a_rank_and_other_costs(capsys):
    arguments = ["--stages", "4", "--microbatches", "2", "--costs", "F=2,B=4", "--message", "2"]
    _, out, _ = explained(capsys, "ScheduleInterleaved1F1B", *arguments)
    assert "interleaved 1F1B: 4 stages on 2 ranks, 2 microbatches" in out
    assert "rank 0  0F0 0F1 .   .   2F0 2F1" in out
    assert "sends   6, 6 messages a step" in out
    _, out, _ = explained(
        capsys, "InterleavedZeroBubble", "--stages", "2", "--ranks", "2", "--microbatches", "2"
    )
    assert out.startswith("ZB-H1: 2 stages on 2 ranks")


def test_a_file(capsys, tmp_path):
    file = tmp_path / "own.csv"
    file.write_text(gpipe(2, 2).to_csv())
    code, out, _ = explained(capsys, str(file))
    assert code == 0
    assert "2 stages on 2 ranks, 2 microbatches" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2f2b", "--stages", "2", "--microbatches", "2"], "'2f2b'; expected one of GPipe, 1F1B"),
        (["1f1b", "--stages", "2"], "1f1b needs --stages and --microbatches"),
        (
            ["1f1b", "--stages", "4", "--microbatches", "2", "--ranks", "3"],
            "4 stages cannot be",
        ),
        (
            ["1f1b", "--stages", "4", "--microbatches", "2", "--ranks", "2"],
            "1F1B has one stage",
        ),
        (["dualpipev", "--stages", "4", "--microbatches", "2"], "expects at least 4, two per rank"),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--costs", "F=x"], "got 'F=x'"),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--costs", "F=0"], "cost of 0F0 is 0"),
        (["there-is-no.csv"], "No such file"),
        (["own.csv", "--stages", "2"], "own.csv determines --stages"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, capsys):
    code, out, err = explained(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_picture_has_each_action(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    arguments = ["--stages", "2", "--microbatches", "3", "--picture", str(file)]
    assert explained(capsys, "gpipe", *arguments)[0] == 0
    drawn = file.read_text()
    assert drawn.count("#4878b0") >= 6  # forwards
    timing = simulate(gpipe(2, 2))
    draw(tmp_path / "two.png", {"planned": timing, "measured": timing})
    assert (tmp_path / "two.png").stat().st_size > 1000


def test_a_picture_without_matplotlib(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = tmp_path / "plan.svg"
    arguments = ["--stages", "2", "--microbatches", "3", "--picture", str(file)]
    code, _, err = explained(capsys, "gpipe", *arguments)
    assert code == 2
    assert "a picture needs matplotlib" in err
    assert not file.exists()


def test_text_of_measured_times():
    timing = simulate(ScheduleTable.from_csv("0F0,0B0"), message=0)
    later = [ActionSpan(0, span.action, span.begin + 7, span.end + 7.1) for span in timing.spans]
    assert text(Timing(1, tuple(later))) == "rank 0  F0 B0 -\n"
