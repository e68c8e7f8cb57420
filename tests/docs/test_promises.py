"""Each promise in docs/reference/promises.md has a test. GPU parts say they are experimental."""

import ast
import re
from functools import cache

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/reference/promises.md").read_text()
EXPERIMENTAL = "xperimental, not run on a GPU"
FOR_GPUS = [
    *(
        path
        for name in ("cuda", "cuda_ipc", "nccl")
        for path in (ROOT / "transport" / name).glob("*.py")
    ),
    *(path for floor in ("meshlib", "parallel") for path in (ROOT / floor).rglob("*gpu*.py")),
    ROOT / "meshlib" / "_groups" / "nccl_splits.py",
    ROOT / "meshlib" / "jit" / "_xla" / "device_buffers.py",
]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


@cache
def functions_of(path):
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda part: part)
def test_a_promise_has_its_test(path, name):
    assert name in functions_of(path)


def test_each_row_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    heads = [line for line in rows if re.fullmatch(r"\|[-|]+\|", line)]
    assert len(heads) == 5
    bodies = [row for row in rows if not re.match(r"\| (promise|what happens) \||\|-", row)]
    assert [row for row in bodies if not re.search(r"`tests/[\w/]+\.py::\w+`", row)] == []


def test_no_test_is_named_in_another_form():
    assert len(re.findall(r"tests/[\w/]+\.py", PAGE)) == len(re.findall(r"\.py::test_\w+`", PAGE))


@pytest.mark.parametrize("path", FOR_GPUS, ids=lambda path: str(path.relative_to(ROOT)))
def test_help_of_a_gpu_module_says_that_it_is_experimental(path):
    assert EXPERIMENTAL in (ast.get_docstring(ast.parse(path.read_text())) or "")


@pytest.mark.parametrize("page", ["README.md", "docs/run/gpu.md", "docs/reference/promises.md"])
def test_pages_say_that_gpu_support_is_experimental(page):
    assert EXPERIMENTAL in " ".join((ROOT / page).read_text().split())
