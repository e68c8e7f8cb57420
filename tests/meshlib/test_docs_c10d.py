"""docs/c10d.md: every name in its tables exists (or says that it does not), and none is missing."""

import importlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import meshlib

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "c10d.md").read_text()
PAIRS = re.findall(r"^\| `?([^|`]+)`? \| (?:`([\w.]+)`|—) \| (.*) ?\|$", TEXT, re.M)
OWN = re.findall(r"^\| `(meshlib\.\w+)` \|", TEXT, re.M)


def resolve(path):
    """Return what a dotted path names: attributes of modules, or modules."""
    parts = path.split(".")
    value = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:i]))
        value = getattr(value, part)
    return value


def test_the_tables_are_read():
    assert len(PAIRS) > 120
    assert len(OWN) > 8


@pytest.mark.parametrize("path", [ours for _, ours, _ in PAIRS if ours] + OWN)
def test_what_is_said_to_be_here_is(path):
    resolve(path)


@pytest.mark.parametrize(("theirs", "note"), [(t, note) for t, ours, note in PAIRS if not ours])
def test_what_is_said_to_be_missing_is_and_says_why(theirs, note):
    assert note.strip()
    name = theirs.strip().rpartition(".")[2]
    assert not hasattr(meshlib, name)
    assert not hasattr(meshlib.Work, name)


def test_every_public_name_is_in_a_table():
    listed = {ours for _, ours, _ in PAIRS} | set(OWN)
    missing = [name for name in meshlib.__all__ if f"meshlib.{name}" not in listed]
    assert not missing


def programs(language):
    text = (DOCS / "coming-from-torch-distributed.md").read_text()
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.M | re.S)


def test_the_program_after_the_change_differs_in_the_import_and_the_arrays_alone():
    before, after = programs("python")[:2]
    expected = before.replace("import torch\n", "import numpy as np\n")
    expected = expected.replace("import torch.distributed as dist", "import meshlib as dist")
    assert after == expected.replace("torch.", "np.")


@pytest.mark.processes
def test_the_program_after_the_change_runs(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(programs("python")[1])
    command = [sys.executable, "-m", "meshlib.launcher.cli", "--nproc-per-node", "2", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_test_in_the_page_passes():
    code = "import numpy as np\nimport meshlib as dist\n" + textwrap.dedent(programs("python")[3])
    exec(compile(code, "coming-from-torch-distributed.md", "exec"), {})
