"""``meshlib checkpoint``: what it prints, and its exit codes."""

import numpy as np
import pytest

from meshlib._cli import main
from meshlib.checkpoint import load, save
from meshlib.sharding import P, Sharding, distribute_array
from meshlib.testing import run_ranks
from tests.support.meshlib.sharding_cases import named_mesh


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder with two checkpoints, the second by 4 ranks."""
    monkeypatch.chdir(tmp_path)
    mesh = named_mesh(4)
    weight = np.arange(96.0).reshape(8, 12)

    def program():
        x = distribute_array(weight, Sharding(mesh, P("a")))
        save("run", {"model": {"w": x, "b": np.ones(3, "f4")}, "lr": 0.1}, step=20, metric=1.5)

    save("run", {"model": {"w": weight, "b": np.zeros(3, "f4")}, "lr": 0.2}, step=3)
    run_ranks(program, 4)
    return tmp_path / "run"


def output_of(capsys, *arguments):
    code = main(["checkpoint", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_ls_and_show(run, capsys):
    (run / "step-30").mkdir()
    code, text = output_of(capsys, "ls", "run")
    assert code == 0
    assert [line.split() for line in text.splitlines()] == [
        ["step", "arrays", "size", "metric", "folder"],
        ["3", "2", "780", "B", "step-3"],
        ["20", "2", "780", "B", "1.5", "step-20"],
        ["30", "step-30", "(never", "finished)"],
    ]
    code, text = output_of(capsys, "show", "run")
    assert code == 0
    assert text == (
        "run/step-20: step 20, metric 1.5, 2 arrays, 780 B\n"
        "['model']['w']  float64[8, 12]  768 B  4 chunks of [2, 12]\n"
        "['model']['b']  float32[3]  12 B  1 chunk\n"
        "['lr']          0.1\n"
    )
    assert output_of(capsys, "show", "run", "--step", "3")[1].startswith(
        "run/step-3: step 3, 2 arrays"
    )


def test_verify(run, capsys):
    code, text = output_of(capsys, "verify", "run")
    assert (code, text) == (0, "run/step-20: 2 arrays, 5 chunks, 780 B: no damage\n")
    for number in (1, 2):
        path = run / "step-20" / "model" / "w" / f"c.{number}.0"
        data = bytearray(path.read_bytes())
        data[7] ^= 255
        path.write_bytes(data if number == 1 else data[:9])
    code, text = output_of(capsys, "verify", "run/step-20")
    assert code == 1
    lines = text.splitlines()
    assert lines[0].startswith(
        "array 'model/w', chunk [1, 0]: run/step-20/model/w/c.1.0 was changed"
    )
    assert "c.2.0 is torn: it has 9 bytes, not 196" in lines[1]
    assert lines[2].endswith("2 DAMAGED")


def test_reshard(run, capsys):
    code, text = output_of(
        capsys, "reshard", "run", "out", "--mesh", "dp=2,tp=3", "--spec", "model/*=dp, tp"
    )
    assert (code, text) == (0, "out/step-20: 2 arrays, 8 chunks were 5\n")
    assert "8 chunks" not in output_of(capsys, "show", "out")[1]
    assert "float64[8, 12]  768 B  6 chunks of [4, 4]" in output_of(capsys, "show", "out")[1]
    assert output_of(capsys, "verify", "out")[0] == 0
    assert output_of(capsys, "diff", "run", "out")[0] == 0
    np.testing.assert_array_equal(load("out")["model"]["w"], load("run")["model"]["w"])
    code, text = output_of(capsys, "reshard", "run", "out", "--mesh", "dp=2")
    assert (code, text) == (
        2,
        "meshlib checkpoint reshard: out/step-20: a checkpoint of this step exists\n",
    )
    code, text = output_of(capsys, "reshard", "run", "new", "--mesh", "dp=2", "--spec", "model")
    assert code == 2
    assert "--spec 'model' has no '='" in text


def test_diff(run, capsys):
    code, text = output_of(capsys, "diff", "run", "run", "--other-step", "3")
    assert code == 1
    assert text == (
        "run/step-20 and run/step-3 differ in 2 of 3 leaves\n"
        "['model']['b']  3 of 3 elements differ, by 1 at most\n"
        "['lr']          0.1 and 0.2\n"
    )
    save("other", {"model": {"w": np.ones((2, 2))}, "more": None}, step=0)
    code, text = output_of(capsys, "diff", "run", "other")
    assert code == 1
    assert "['model']['w']  float64[8, 12] and float64[2, 2]" in text
    assert "['more']        only in other/step-0" in text


def test_what_is_no_checkpoint(run, capsys):
    for word in ("ls", "show", "verify"):
        code, text = output_of(capsys, word, "nowhere")
        assert code == 2
        assert text.startswith(f"meshlib checkpoint {word}: nowhere ")
    with pytest.raises(SystemExit):
        main(["checkpoint", "shwo", "run"])
    assert "invalid choice: 'shwo'" in capsys.readouterr().err
