"""The C of transport knows nothing of the floors above it: no file, no type, no attribute."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import transport._native

NATIVE = Path(transport._native.__file__).parent
SOURCES = sorted(NATIVE.rglob("*.[ch]"))

# What looks names up in Python, or makes them to be looked up.
_LOOK_UP = re.compile(
    r"Py\w*_(?:Get|Set|Has|Del|Lookup)(?:Optional)?Attr\w*|Py\w*_CallMethod\w*|PyUnicode_Intern\w*"
    r"|PyImport_\w+|PyEval_GetFrame|PyFrame_\w+|Py_BUILD_CORE"
)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.relative_to(NATIVE).as_posix())
def test_no_name_of_python_is_looked_up(source: Path) -> None:
    assert _LOOK_UP.findall(source.read_text()) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.relative_to(NATIVE).as_posix())
def test_no_floor_above_is_named(source: Path) -> None:
    assert re.findall(r"meshlib|parallel/", source.read_text()) == []


@pytest.mark.parametrize(
    "source", sorted((NATIVE / "engine").rglob("*.[ch]")), ids=lambda p: p.name
)
def test_the_engine_knows_no_python(source: Path) -> None:
    assert re.findall(r"Python\.h|\bPy[A-Z_]\w+", source.read_text()) == []
