"""Every name of CuPy and nccl4py that is used exists there, and takes as many arguments.

Both install and import without a GPU. Their functions say in their docstrings what they take; the
calls are read from the source of the files that make them.
"""

from __future__ import annotations

import ast
import gc
import re
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
CUPY_FILES = (
    "transport/_cuda/cupy_driver.py",
    "transport/_cuda/kernels.py",
    "transport/_nccl/library.py",
    "meshlib/_arrays/on_gpu.py",
    "tests/gpu/gpu_ranks.py",
    "tests/gpu/bench.py",
    "tests/gpu/check.py",
    "tests/gpu/test_gpu.py",
)
# What is behind the names that these files give to modules and objects of the two.
CUPY_NAMES = {
    "cupy": "cupy",
    "_runtime": "cupy.cuda.runtime",
    "self._cupy": "cupy",
    "_CupyComm.self._comm": "cupy.cuda.nccl:NcclCommunicator",
    "CupyNccl.self._module": "cupy.cuda.nccl",
    "_CupyComm.module": "cupy.cuda.nccl",
}
NCCL4PY_NAMES = {
    "_Nccl4PyComm.self._bindings": "nccl.bindings.nccl",
    "Nccl4Py.self._bindings": "nccl.bindings.nccl",
}


def names_in(file: str) -> list[tuple[str, str, ast.Call | None]]:
    """All dotted names in a file: (class, name, the call of it if it is one)."""
    found: list[tuple[str, str, ast.Call | None]] = []

    def visit(node: ast.AST, inside: str) -> None:
        if isinstance(node, ast.ClassDef):
            inside = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.append((inside, ast.unparse(node.func), node))
        elif isinstance(node, ast.Attribute):
            found.append((inside, ast.unparse(node), None))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse((ROOT / file).read_text()), "")
    return found


def resolve(target: str) -> Any:
    module, _, attribute = target.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def check(files: tuple[str, ...], names: dict[str, str]) -> int:
    """Look up all that ``files`` use of ``names``; return how many uses that were."""
    uses = 0
    for file in files:
        for inside, name, call in names_in(file):
            for known, target in names.items():
                root = known.removeprefix(f"{inside}.")
                if not name.startswith(f"{root}.") or "(" in name:
                    continue
                thing = resolve(target)
                for part in name.removeprefix(f"{root}.").split("."):
                    assert hasattr(thing, part), f"{file}: {name}: there is no {part!r}"
                    thing = getattr(thing, part)
                uses += 1
                if call is not None:
                    check_arguments(f"{file}: {name}", thing, call)
    return uses


def check_arguments(where: str, function: Any, call: ast.Call) -> None:
    text = " ".join((function.__doc__ or "").split())
    described = re.match(r"[\w.]+\(([^()]*)\)", text)
    if described is None or any(isinstance(argument, ast.Starred) for argument in call.args):
        return
    wanted = [part.strip() for part in described[1].split(",") if part.strip()]
    wanted = [part for part in wanted if part not in ("self", "cls", "*", "/")]
    if any(part.startswith("*") for part in wanted):
        return
    least = sum("=" not in part for part in wanted)
    given = len(call.args) + len(call.keywords)
    assert least <= given <= len(wanted), f"{where} gets {given} arguments, takes {described[0]}"


def test_what_is_used_of_cupy_exists() -> None:
    if find_spec("cupy") is None:
        pytest.skip("no CuPy here: pip install cupy-cuda12x (a GPU is not needed)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it finds no NCCL
        found = import_module("cupy.cuda.nccl").available
    if not found:
        pytest.skip("CuPy finds no NCCL here: pip install nvidia-nccl-cu12")
    assert check(CUPY_FILES, CUPY_NAMES) > 60


def test_what_is_used_of_nccl4py_exists() -> None:
    if find_spec("nccl") is None:
        pytest.skip("no nccl4py here: pip install 'nccl4py[cu12]' (a GPU is not needed)")
    assert check(("transport/_nccl/library.py",), NCCL4PY_NAMES) > 10


def test_a_stream_by_its_handle_is_not_destroyed_with_its_wrapper(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """CuPy destroys its own ones that nobody refers to, and complains where it cannot."""
    if find_spec("cupy") is None:
        pytest.skip("no CuPy here: pip install cupy-cuda12x (a GPU is not needed)")
    external = import_module("transport._cuda.cupy_driver")._external
    assert external(77).ptr == 77
    gc.collect()
    assert "streamDestroy" not in capfd.readouterr().err


def test_missing_names_and_wrong_arguments_are_noticed(tmp_path: Path) -> None:
    """So that the tests above can fail."""
    names = {"base": "base64"}
    for line in ("base.b64encoded(b'')", "base.no.such"):
        (tmp_path / "wrong.py").write_text(line)
        with pytest.raises(AssertionError, match="there is no"):
            check((str(tmp_path / "wrong.py"),), names)

    def documented() -> None:
        """f(a, int b, c=None) -> int"""

    for arguments, fine in (("", False), ("1, 2", True), ("1, b=2, c=3", True), ("1,2,3,4", False)):
        call = ast.parse(f"f({arguments})", mode="eval").body
        assert isinstance(call, ast.Call)
        if fine:
            check_arguments("here", documented, call)
        else:
            with pytest.raises(AssertionError, match="takes"):
                check_arguments("here", documented, call)


@pytest.mark.parametrize("file", [*CUPY_FILES])
def test_the_files_that_are_looked_at_are_there(file: str) -> None:
    assert names_in(file)
