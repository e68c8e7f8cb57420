"""``meshlib explain`` and the ``meshlib`` command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshlib
from meshlib import _cli as cli
from meshlib._explain.mesh import explain_mesh
from meshlib._mesh.config import MeshConfig

FILE = """
[mesh]
dp = -1
tp = 2
timeout = "30s"

[mesh.flatten]
world = ["dp", "tp"]

[mesh.options.tp]
backend = "tcp"
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.toml").write_text(FILE)
    return "train.toml"


def test_ranks_coordinates_and_groups(file, capsys):
    assert cli.main(["explain", "mesh", file, "--world-size", "4"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == (
        "mesh dp=2 × tp=2: 4 ranks  (train.toml)\n"
        "\n"
        "rank  dp  tp\n"
        "   0   0   0\n"
        "   1   0   1\n"
        "   2   1   0\n"
        "   3   1   1\n"
        "\n"
        "groups\n"
        "  dp               2 groups of 2  [0, 2] [1, 3]  timeout 30 s\n"
        "  tp               2 groups of 2  [0, 1] [2, 3]  backend tcp, timeout 30 s\n"
        "  world (dp × tp)  1 group of 4   [0, 1, 2, 3]   timeout 30 s\n"
    )


def test_the_topics_are_four(capsys):
    assert cli.main(["explain", "--help"]) == 0
    shown = re.findall(r"^  (\w+) +(\S.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _ in shown] == ["estimate", "mesh", "plan", "schedule"]
    assert cli.main(["explain"]) == 2
    capsys.readouterr()
    for name, words in shown:
        with pytest.raises(SystemExit):
            cli.main(["explain", name, "--help"])
        printed = capsys.readouterr().out
        assert printed.startswith(f"usage: meshlib explain {name} ")
        assert words in " ".join(printed.split())
    assert cli.main(["explain", "mash"]) == 2
    assert capsys.readouterr().err == (
        "meshlib explain: 'mash' is not a topic; expected estimate, mesh, plan, schedule;"
        " did you mean 'mesh'?\n"
    )


def test_the_floors_below_do_not_import_the_schedules():
    program = "import sys; from meshlib._cli import main; main(sys.argv[1:]); "
    program += "assert 'parallel' not in sys.modules"
    for topic in (["mesh", "dp=2"], ["plan", "dp=2", "--from=dp", "--to=None", "--shape=4"]):
        command = [sys.executable, "-c", program, "explain", *topic]
        subprocess.run(command, check=True, timeout=30, stdout=subprocess.DEVNULL)


def test_one_rank_only(capsys):
    assert cli.main(["explain", "mesh", "pp=2,dp=2,tp=2", "--rank", "5"]) == 0
    assert capsys.readouterr().out == (
        "mesh pp=2 × dp=2 × tp=2: 8 ranks\n"
        "\n"
        "rank  pp  dp  tp\n"
        "   5   1   0   1\n"
        "\n"
        "groups of rank 5\n"
        "  pp  rank 1 of 2  [1, 5]\n"
        "  dp  rank 0 of 2  [5, 7]\n"
        "  tp  rank 1 of 2  [4, 5]\n"
    )


def test_the_coordinates_and_groups_are_those_of_the_mesh():
    config = MeshConfig.from_string("a=3,b=1,c=4")
    text = explain_mesh(config)
    mesh = config.mesh_for(12)
    lines = [line.split() for line in text.splitlines()]
    for rank in range(12):
        assert [str(n) for n in (rank, *mesh.coordinate_of(rank))] in lines
    for name in "abc":
        shown = " ".join(str(group.tolist()) for group in mesh[name].slices())
        assert shown in text or name == "b"


@pytest.mark.parametrize("text", ["dp=65", "dp=2,tp=500", "pp=64,dp=128,tp=128", "dp=2000000000"])
def test_many_ranks_are_summarised(text):
    config = MeshConfig.from_string(text)
    shown = explain_mesh(config)
    assert len(shown.splitlines()) < 40
    assert len(max(shown.splitlines(), key=len)) < 200
    for rank in (0, config.world_size - 1):
        assert any(line.split()[:1] == [str(rank)] for line in shown.splitlines())


def test_64_ranks_each_have_a_line():
    lines = [
        line.split()[:1] for line in explain_mesh(MeshConfig.from_string("dp=8,tp=8")).splitlines()
    ]
    assert all([str(rank)] in lines for rank in range(64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.toml", "--world-size", "5"], "train.toml: [mesh] dp=-1 × tp=2: the other dims"),
        (["train.toml"], "dp=-1 × tp=2 has a degree to infer; give --world-size N"),
        (["none.toml", "--world-size", "4"], "none.toml: No such file or directory"),
        (["train.txt", "--world-size", "4"], "suffix '.txt'"),
        (["dp=2,tp=2", "--world-size", "8"], "needs 4 ranks, but the world size is 8"),
        (["dp=2,tp=x"], "'tp=x' is not a dim"),
        (["dp=2", "--rank", "2"], "rank 2 is not there; expected 0 to 1"),
        (["dp=2", "--rank", "-1"], "rank -1 is not there"),
        (["dp=99999999999"], "more than 2147483647"),
        (["dp=2", "--world-size", "0"], "world_size is 0"),
        (["dp=2", "--world-size", "two"], "--world-size: invalid int value: 'two'"),
        (["train.toml", "--mash"], "unrecognized arguments: --mash"),
        ([], "the following arguments are required: MESH"),
        (["dp=2", "--stages", "2"], "unrecognized arguments: --stages 2"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(file, capsys, arguments, message):
    try:
        code = cli.main(["explain", "mesh", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("meshlib explain mesh: ")
    assert err.count("\n") == 1
    assert message in err


def test_the_command_lists_commands_and_knows_its_version(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    version, core = capsys.readouterr().out.splitlines()
    assert version == f"meshlib {meshlib.__version__}"
    assert core.startswith("compiled core: ")
    assert cli.main([]) == 2
    capsys.readouterr()
    assert cli.main(["explian"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(
        "meshlib: 'explian' is not a command; expected checkpoint, explain, run, "
    )
    assert err.endswith("; did you mean 'explain'?\n")


def test_a_terminal_without_the_signs_is_no_error():
    program = "import sys; from meshlib._cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "explain", "mesh", "dp=2,tp=2"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"mesh dp=2 ? tp=2: 4 ranks\n")


def test_the_documentation_shows_what_is_printed(tmp_path, capsys):
    text = (Path(__file__).parents[2] / "docs/program/mesh.md").read_text()
    session = re.search(r"```console\n\$ meshlib (.*?)```", text, re.DOTALL)[1]
    command, _, shown = session.partition("\n")
    assert cli.main(command.split()) == 0
    assert capsys.readouterr().out == shown
    (tmp_path / "train.toml").write_text(re.search(r"```toml[^\n]*\n(.*?)```", text, re.DOTALL)[1])
    config = MeshConfig.load(tmp_path / "train.toml")
    assert config.resolve(16).shape == (2, 4, 2)
    assert config.mesh_for(16)["batch"].size() == 8


def test_a_reader_that_leaves_early_is_no_error():
    program = "import sys; from meshlib._cli import main; sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen(
        [sys.executable, "-c", program, "explain", "mesh", "dp=4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0
