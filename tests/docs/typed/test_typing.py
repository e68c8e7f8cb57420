"""Programs whose types are checked run, too."""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from meshlib.testing import run_ranks
from tests.docs.typed import basic_user, data_parallel, stencil, summa, typed_user

PYRIGHT = shutil.which("pyright", path=sysconfig.get_path("scripts"))


def test_the_typed_program_runs():
    ended = run_ranks(typed_user.main, 2)
    assert ended[0][0] == ended[1][0]
    for _, losses in ended:
        assert len(losses) == 2


def test_a_program_in_torchs_idioms_runs():
    assert run_ranks(basic_user.main, 4) == [[4.0] * 3] * 4


def test_three_typed_programs_run():
    weights = run_ranks(data_parallel.main, 2)
    assert weights == [[0.0, 1.0, 2.0, 3.0]] * 2
    rods = run_ranks(stencil.main, 3)
    assert rods[0] == rods[1] == rods[2] != [0.0] * 12
    assert all(error < 1e-12 for error in run_ranks(summa.main, 4))


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
