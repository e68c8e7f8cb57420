"""docs/reference/c10d.md: each name in its tables exists, or says why not, and none is missing."""

import importlib
import re
from pathlib import Path

import pytest

import meshlib

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "reference/c10d.md").read_text()
PAIRS = re.findall(r"^\| `?([^|`]+)`? \| (?:`([\w.]+)`|—) \| (.*) ?\|$", TEXT, re.M)
BEYOND = (DOCS / "reference/beyond-c10d.md").read_text()
OWN = re.findall(r"^\| `(meshlib\.\w+)` \|", BEYOND, re.M)


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


def programs(title):
    text = (DOCS / "program/coming-from-torch-distributed.md").read_text()
    return re.search(rf'^```python title="{title}"\n(.*?)^```', text, re.M | re.S)[1]


def test_the_program_after_the_change_differs_in_the_import_and_the_arrays_alone():
    expected = programs("before.py").replace("import torch\n", "import numpy as np\n")
    expected = expected.replace("import torch.distributed as dist", "import meshlib as dist")
    assert programs("train.py") == expected.replace("torch.", "np.")
