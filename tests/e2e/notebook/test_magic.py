"""``%%ranks``, in IPython's own shell, and how it finds the ranks."""

from __future__ import annotations

import pytest

from meshlib.notebook import Ranks, _magic

pytest.importorskip("cloudpickle")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


class NoRanks(Ranks):
    """Ranks that are nowhere."""

    def __init__(self, closed=False):
        self.closed = closed

    @property
    def is_closed(self):
        return self.closed

    def __getitem__(self, which):
        return f"some: {which}"


def test_the_only_ranks_are_found_by_themselves():
    ranks = NoRanks()
    variables = {"x": 3, "ranks": ranks, "_": ranks, "old": NoRanks(closed=True)}
    assert _magic.find_ranks(variables, "") is ranks
    assert _magic.find_ranks(variables, " dp=0,tp=1 ") == "some: dp=0,tp=1"
    assert _magic.find_ranks(variables | {"others": NoRanks()}, "ranks tp=0") == "some: tp=0"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "found one, two"),
        ("x", "x holds no ranks"),
        ("one two", "expected %%ranks"),
        ("three", "three holds no ranks"),
    ],
)
def test_lines_that_name_no_ranks(line, message):
    with pytest.raises(ValueError, match=message):
        _magic.find_ranks({"one": NoRanks(), "two": NoRanks(), "x": 3}, line)


def test_a_cell_of_ipython_runs_on_the_ranks(capsys):
    shells = pytest.importorskip("IPython.core.interactiveshell")
    shell = shells.InteractiveShell.instance()
    shell.history_manager.enabled = False
    try:
        ran = shell.run_cell("import meshlib as dist\nranks = dist.local_ranks('dp=2')")
        ran.raise_error()
        shell.run_line_magic("load_ext", "meshlib.notebook")
        shell.run_cell("%%ranks\nimport meshlib as dist\nx = dist.get_rank() + 1\nx").raise_error()
        assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] 1", "[rank 1] 2"]
        shell.run_cell("%%ranks dp=1\nx = 10").raise_error()
        result = shell.run_cell("def look():\n    return x\nranks.run(look)")
        assert result.result == {0: 1, 1: 10}
        failed = shell.run_cell("def f():\n    return 1 / 0  # this line\nranks.run(f)")
        assert "return 1 / 0  # this line" in str(failed.error_in_exec)
    finally:
        if "ranks" in shell.user_ns:
            shell.user_ns["ranks"].close()
        shells.InteractiveShell.clear_instance()
        capsys.readouterr()
