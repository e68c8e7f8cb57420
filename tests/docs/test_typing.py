"""Programs whose types are checked run, too."""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import basic_user
import pytest
import typed_user

from meshlib.testing import run_ranks

PYRIGHT = shutil.which("pyright", path=sysconfig.get_path("scripts"))


def test_the_typed_program_runs():
    ended = run_ranks(typed_user.main, 2)
    assert ended[0][0] == ended[1][0]
    for _, losses in ended:
        assert len(losses) == 2


def test_a_program_in_torchs_idioms_runs():
    assert run_ranks(basic_user.main, 4) == [[4.0] * 3] * 4


@pytest.mark.skipif(not PYRIGHT, reason="pyright is not installed")
def test_pyrights_basic_mode_takes_a_program_in_torchs_idioms(tmp_path):
    # A folder of its own: the project's settings, which are strict, are not asked.
    shutil.copy(Path(basic_user.__file__), tmp_path)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "basic"}')
    command = [PYRIGHT, "--outputjson", "--pythonpath", sys.executable, "basic_user.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    report = json.loads(ended.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    found = report["generalDiagnostics"]
    assert not [f"{d['range']['start']['line'] + 1}: {d['message']}" for d in found]
