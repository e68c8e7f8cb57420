"""What a user's type checker says of a program that uses the public names."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import typed_user
from pages import ROOT

from meshlib.testing import run_ranks


@pytest.mark.processes
@pytest.mark.skipif(find_spec("pyright") is None, reason="needs pyright")
def test_a_users_program_is_right_under_strict_pyright(tmp_path):
    program = (ROOT / "tests/docs/typed_user.py").read_text()
    (tmp_path / "train.py").write_text(program + "\nwrong: str = dist.get_rank()\n")
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "include": ["train.py"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"],
        cwd=tmp_path,
        env=os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    # The last line is wrong, so that this cannot pass where the types are not seen at all.
    assert [(one["rule"], one["range"]["start"]["line"]) for one in found] == [
        ("reportAssignmentType", program.count("\n") + 1)
    ], found


def test_that_program_runs():
    ended = run_ranks(typed_user.main, 2)
    assert ended[0][0] == ended[1][0]
    for _, losses in ended:
        assert len(losses) == 2
