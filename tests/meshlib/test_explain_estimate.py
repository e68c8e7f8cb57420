"""``meshlib explain estimate`` of a program of one's own: what it prints, and wrong input."""

import re
from pathlib import Path

import numpy as np
import pytest

import meshlib as dist
from meshlib import _cli as cli
from meshlib._explain.estimate import estimate
from meshlib.testing import run_ranks

PAGE = Path(__file__).parents[2] / "docs/train/estimate.md"

PROGRAM = """
import numpy as np
from sizes import SIZE  # beside the program

def make_step(file, mesh):
    both = mesh["dp", "tp"]
    mesh["dp"].all_reduce(np.ones(3))  # not of a step

    def step():
        mesh["dp"].all_reduce(np.ones(SIZE))
        mesh["tp"].all_gather_into_tensor(np.empty(2 * SIZE), np.ones(SIZE))
        both.reduce_scatter_tensor(np.empty(SIZE), np.ones(4 * SIZE))
        mesh["dp"].get_group().send(np.ones(SIZE), group_dst=1 - mesh.get_local_rank("dp"))
        mesh["dp"].get_group().recv(np.ones(SIZE), group_src=1 - mesh.get_local_rank("dp"))
        return {"parameters": [np.ones(SIZE), {"b": np.ones(1)}], "nothing": None}

    return step
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sizes.py").write_text("SIZE = 125_000  # MB in float64\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "train.toml").write_text("[mesh]\ndp = 2\ntp = 2\n")
    return tmp_path


CALLS = [
    ["dp", "all_reduce", "1", "1.000", "1.000"],
    ["tp", "all_gather", "1", "2.000", "1.000"],
    ["dp × tp", "reduce_scatter", "1", "4.000", "3.000"],
    ["dp", "send", "1", "1.000", "1.000"],
    ["dp", "recv", "1", "1.000", "0.000"],
]


def rows_of(text):
    lines = text.partition("calls of a step\n")[2].splitlines()[1:]
    return [re.split(r"  +", line.strip()) for line in lines]


def test_calls_by_the_dims_of_the_mesh(folder, capsys):
    for rank in ("0", "3"):
        assert cli.main(["explain", "estimate", "train.py", "train.toml", "--rank", rank]) == 0
        shown = capsys.readouterr().out
        assert sorted(rows_of(shown)) == sorted(CALLS)
        assert re.search(r"^  parameters +1\.000$", shown, re.MULTILINE)
        assert re.search(r"^  nothing +0\.000$", shown, re.MULTILINE)
    assert not dist.is_initialized()


def test_the_calls_are_those_of_a_real_run(folder):
    names = {}
    exec(PROGRAM, names)

    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return str(estimate(names["make_step"], folder / "train.toml", mesh))

    for text in run_ranks(program, 4, timeout=60)[:1]:
        assert sorted(rows_of(text)) == sorted(CALLS)


def test_the_page_shows_what_is_printed(tmp_path, monkeypatch, capsys):
    pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")
    pytest.importorskip("optax")
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    for name in ("train.py", "train.toml"):
        block = re.search(rf'```\w+ title="{name}"\n(.*?)```', page, re.DOTALL)
        (tmp_path / name).write_text(block[1])
    shown = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]
    assert cli.main(["explain", "estimate", "train.py", "train.toml", "--over=dp=2,tp=2"]) == 0
    printed = capsys.readouterr().out
    # Another release of XLA may need other temporaries.
    own = re.compile(r"^  (activations|XLA's|together).*$", re.MULTILINE)
    assert own.sub("", printed) == own.sub("", shown)
    assert len(own.findall(printed)) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py", "none.toml"], "none.toml: No such file or directory"),
        (
            ["train.py", "none.toml", "--over", "dp=2"],
            "none.toml is not a file; expected the program",
        ),
        (["none.py", "train.toml"], "none.py: No such file or directory"),
        (["sizes.py", "train.toml"], "sizes.py has no function make_step(file, mesh)"),
        (["empty.py", "train.toml"], "the step returned None; expected a dict of the rank"),
        (["train.py", "train.toml", "--over", "dp=2"], "dim 'tp' is not there; expected one of dp"),
        (["train.py", "train.toml", "--rank", "4"], "rank 4 is not there; expected 0 to 3"),
        (["train.py"], "the following arguments are required: FILE"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(folder, capsys, arguments, message):
    (folder / "empty.py").write_text("def make_step(file, mesh):\n    return lambda: None\n")
    try:
        code = cli.main(["explain", "estimate", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("meshlib explain estimate: ")
    assert err.count("\n") == 1
    assert message in err
    assert not dist.is_initialized()


def test_a_profile_knows_its_groups_when_the_job_is_over():
    dist.init_process_group("fake", rank=0, world_size=4)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with dist.profile() as profile:
        mesh["tp"].all_reduce(np.ones(1))
    dist.destroy_process_group()
    assert [row.group for row in profile.summaries()] == ["tp"]
