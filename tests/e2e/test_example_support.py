"""The examples' common code: settings, progress, and the dims of any mesh."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from meshlib import DeviceMesh

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Training:
    epochs: int
    lr: float
    name: str


@pytest.fixture(autouse=True)
def _examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:
        del sys.modules[name]


def read(tmp_path, text):
    from support.settings import SettingsFile

    path = tmp_path / "train.toml"
    path.write_text(text)
    return SettingsFile(path).read("train", Training, ["epochs"])


def test_the_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits as theirs
    from support.digits import load_digits

    for ours, expected in zip(load_digits(), theirs(return_X_y=True), strict=True):
        assert ours.dtype == expected.dtype
        np.testing.assert_array_equal(ours, expected)


def test_settings_are_read(tmp_path):
    settings = read(tmp_path, "[train]\nepochs = 2\nlr = 1\nname = 'x'")
    assert settings == Training(2, 1.0, "x")
    assert isinstance(settings.lr, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nepochs = 2", r"there is no table \[train\]"),
        ("[train]\nepochs = 2\nlr = 1", r"\[train\] name is missing; expected a string"),
        ("[train]\nepoch = 2", r"\[train\] epoch is not known; did you mean epochs"),
        ("[train]\nepochs = '2'\nlr = 1\nname = ''", r"\[train\] epochs is '2', expected a whole"),
        (
            "[train]\nepochs = true\nlr = 1\nname = ''",
            r"\[train\] epochs is True, expected a",
        ),
        ("[train]\nepochs = 1\nlr = -1\nname = ''", r"\[train\] lr is -1, expected 0 or more"),
        ("[train]\nepochs = 0\nlr = 1\nname = ''", r"\[train\] epochs is 0, expected more than 0"),
        ("[train", r"Expected .* \(at "),
    ],
)
def test_what_is_wrong_is_said_with_file_and_key(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"train\.toml: {message}"):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path):
    from support.settings import SettingsFile

    with pytest.raises(ValueError, match=r"none\.toml: .*No such file"):
        SettingsFile(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("names", "shape", "replicas", "tp"),
    [
        (("dp", "tp"), (2, 3), [[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]),
        (("tp", "dp"), (2, 2), [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        (("dp",), (2,), [[0, 1]], [[0], [1]]),
        (("tp",), (2,), [[0], [1]], [[0, 1]]),
        (("a", "b"), (2, 2), [[[0, 1], [2, 3]]], [[0], [1], [2], [3]]),
    ],
)
def test_each_mesh_has_replicas_and_tp(names, shape, replicas, tp):
    from support.any_mesh import replicas_and_tp

    mesh = DeviceMesh.from_shape("cpu", shape, mesh_dim_names=names)
    found = replicas_and_tp(mesh)
    assert [slices.tolist() for slices in found[0].slices()] == replicas
    assert [slices.tolist() for slices in found[1].slices()] == tp


@pytest.mark.parametrize(("every", "lines"), [(0.0, [1, 2, 3]), (1e9, [3])])
def test_progress_in_a_pipe_is_a_line_now_and_then_and_one_at_the_end(capsys, every, lines):
    from support.progress import Progress

    with Progress(shown=True, every=every) as progress:
        advance = progress.task("dp=2", 3)
        for i in range(3):
            advance(f"loss {i}")
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"dp=2: {n} of 3, loss {n - 1}, 0 s" for n in lines]


def test_one_rank_alone_shows_progress(capsys):
    from support.progress import Progress

    with Progress(shown=False, every=0) as progress:
        progress.task("dp=2", 1)("loss")
    assert capsys.readouterr().out == ""
