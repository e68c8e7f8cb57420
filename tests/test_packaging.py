"""The contents of the distributions, with a compiled core and without one. Needs no network."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from tests import versions
from tests.wheels.build import PYTHONS

ROOT = Path(__file__).parents[1]
PACKAGES = ("meshlib", "parallel", "transport")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
BINARY = f"transport/_native/_core{SUFFIX}"
BINARIES = {BINARY, f"meshlib/_native/_calls{SUFFIX}"}
REASON = "transport/_native/_core.txt"
SOURCES = {
    path.relative_to(ROOT).as_posix()
    for package in ("transport", "meshlib")
    for path in (ROOT / package / "_native").rglob("*.[ch]")
}
LEFT = {"_core", "_calls"}
HOW = "with a C compiler and Python's headers (Debian: gcc, python3-dev)"
SMALL_CORE = """
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "transport._native._core"};
PyMODINIT_FUNC PyInit__core(void) { return PyModule_Create(&definition); }
"""

compiles = pytest.mark.skipif(
    not shutil.which("cc")
    or not Path(sysconfig.get_path("include"), "Python.h").is_file()
    or bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="needs a C compiler, Python.h, and a Python with its lock",
)


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("MESHLIB_NATIVE", raising=False)


def build(builder, tree, into, version="standard"):
    """Build a distribution of ``tree``: the only file in ``into`` then."""
    assert len(list(builder(str(tree)).build(directory=str(into), versions=[version]))) == 1
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    built = build(SdistBuilder, ROOT, folder)
    with tarfile.open(built) as archive:
        archive.extractall(folder / "tree", filter="data")
    (tree,) = (folder / "tree").iterdir()
    return tree


@pytest.fixture
def tree(unpacked, tmp_path):
    """A copy of it, with a core that compiles fast."""
    shutil.copytree(unpacked, tmp_path / "tree")
    for source in SOURCES:
        (tmp_path / "tree" / source).unlink()
    (tmp_path / "tree/transport/_native/core.c").write_text(SMALL_CORE)
    calls = SMALL_CORE.replace("_core", "_calls").replace("transport", "meshlib")
    (tmp_path / "tree/meshlib/_native/calls.c").write_text(calls)
    return tmp_path / "tree"


@pytest.fixture
def hook():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package_files(top):
    """The files of the packages below ``top``, less what Python and the compiler leave there."""
    return {
        path.relative_to(top).as_posix()
        for package in PACKAGES
        for path in (top / package).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not (path.stem.split(".")[0] in LEFT and path.suffix in {".so", ".txt"})
    }


def wheel_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.split("/")[0] in PACKAGES}


def wheel_facts(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        lines = archive.read(name).decode().splitlines()
    return {key: value for key, _, value in (line.partition(": ") for line in lines) if key}


def loaded(path, **environment):
    """The core that ``transport._native`` has in a fresh process, or the reason for none."""
    program = "from transport._native import core, why_not; print(core is not None, why_not)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(path), **environment},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
    )
    return result.stdout.strip()


def assert_pure(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    facts = wheel_facts(wheel)
    assert facts["Root-Is-Purelib"] == "true"
    assert facts["Tag"] == "py3-none-any"
    assert wheel_files(wheel) == package_files(ROOT) - SOURCES | {REASON}


def test_sdist_has_the_source_and_no_binary(unpacked):
    assert package_files(unpacked) == package_files(ROOT)
    assert {*SOURCES, "transport/_choosing/tuning.json"} < package_files(unpacked)
    assert all((unpacked / f"{package}/py.typed").is_file() for package in PACKAGES)
    assert (unpacked / "hatch_build.py").is_file()
    assert not list(unpacked.rglob("*.so"))


@compiles
def test_wheel_with_a_core(unpacked, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MESHLIB_NATIVE", "1")
    wheel = build(WheelBuilder, unpacked, tmp_path / "dist")
    monkeypatch.delenv("MESHLIB_NATIVE")
    assert capsys.readouterr().err == ""
    assert not list(unpacked.rglob("*.so"))

    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    facts = wheel_facts(wheel)
    assert facts["Tag"].startswith(f"{version}-{version}")
    assert facts["Tag"].endswith(f"linux_{os.uname().machine}")
    assert facts["Root-Is-Purelib"] == "false"
    assert wheel.name.endswith(f"-{facts['Tag']}.whl")
    assert wheel_files(wheel) == package_files(ROOT) - SOURCES | BINARIES

    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert loaded(site) == "True None"
    off = "False MESHLIB_NATIVE=0 in the environment; unset it to have the core"
    assert loaded(site, MESHLIB_NATIVE="0") == off
    assert loaded(site, MESHLIB_NATIVE="no").endswith(
        "ValueError: environment variable MESHLIB_NATIVE is 'no'; expected 0, 1 or nothing"
    )
    # As one for another machine is.
    (site / BINARY).write_bytes(b"\x7fELF, and not of here")
    said = loaded(site)
    assert said.startswith(f"False {site / BINARY}: ")
    assert "install meshlib again" in said
    (site / BINARY).rename(site / "transport/_native/_core.cpython-38-x86_64-linux-gnu.so")
    assert "built for another Python (_core.cpython-38" in loaded(site)
    (site / "transport/_native/_core.cpython-38-x86_64-linux-gnu.so").unlink()
    assert "it was never built; install meshlib again" in loaded(site)


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CC", "/nowhere/cc -pipe", "there is no C compiler '/nowhere/cc -pipe'"),
        ("CC", "cc '", "the C compiler's command \"cc '\": No closing quotation"),
        ("CC", "/bin/false", "compiling with /bin/false ended with status 1"),
        ("MESHLIB_NATIVE", "0", "MESHLIB_NATIVE=0"),
    ],
)
def test_pure_wheel(tree, tmp_path, monkeypatch, capsys, variable, value, reason):
    (tree / BINARY).write_bytes(b"left by an editable installation")
    monkeypatch.setenv(variable, value)
    wheel = build(WheelBuilder, tree, tmp_path / "dist")
    assert capsys.readouterr().err == f"meshlib without its compiled core: {reason}\n"
    assert_pure(wheel)
    monkeypatch.delenv(variable)
    cause, mend = loaded(wheel).split("; install meshlib again ")
    assert cause == f"False it was not built when meshlib was installed: {reason}"
    assert mend == ("without that" if variable == "MESHLIB_NATIVE" else HOW)


@compiles
def test_a_core_that_does_not_compile(tree, tmp_path, monkeypatch, capsys):
    (tree / "transport/_native/core.c").write_text(SMALL_CORE + "int broken = ;\n")
    assert_pure(build(WheelBuilder, tree, tmp_path / "dist"))
    printed = capsys.readouterr().err
    assert printed.startswith("meshlib without its compiled core: compiling with ")
    assert "transport/_native/core.c:5:14: error: " in printed
    assert printed.count("\n") == 1

    monkeypatch.setenv("MESHLIB_NATIVE", "1")
    with pytest.raises(RuntimeError, match="MESHLIB_NATIVE=1, and no compiled core: compiling"):
        build(WheelBuilder, tree, tmp_path / "none")
    assert not list((tmp_path / "none").iterdir())


def test_a_switch_that_is_none(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHLIB_NATIVE", "yes")
    with pytest.raises(ValueError, match="MESHLIB_NATIVE is 'yes'; expected 0, 1 or nothing"):
        build(WheelBuilder, tree, tmp_path / "none")


@compiles
def test_editable(tree, tmp_path, monkeypatch):
    def install(name):
        wheel = build(WheelBuilder, tree, tmp_path / name, "editable")
        assert not wheel_files(wheel)
        with zipfile.ZipFile(wheel) as archive:
            assert Path(archive.read("_meshlib_spmd.pth").decode()).samefile(tree)
        return {path.name for path in (tree / "transport/_native").iterdir() if path.is_file()}

    source = {"__init__.py", "core.c"}
    assert install("first") == source | {Path(BINARY).name}
    assert loaded(tree) == "True None"

    later = (tree / BINARY).stat().st_mtime_ns + 10**9
    os.utime(tree / "transport/_native/core.c", ns=(later, later))
    said, result = loaded(tree).splitlines()
    assert said.startswith("running without the compiled core: ")
    assert "core.c was changed after" in said
    assert "install meshlib again" in said
    assert result == f"False {said.removeprefix('running without the compiled core: ')}"
    assert loaded(tree, LOCAL_RANK="1") == result  # once is enough

    # Nothing old stays behind where it cannot be built again.
    monkeypatch.setenv("CC", "/bin/false")
    assert install("second") == source | {Path(REASON).name}
    assert "compiling with /bin/false ended with status 1" in loaded(tree)


def test_no_source(hook, tmp_path):
    with pytest.raises(hook.NotBuilt, match="native has no sources"):
        hook.compile_core(tmp_path, tmp_path / "built.so")


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        ("sys.platform", "darwin", "it is for Linux, not darwin"),
        ("sys.implementation.name", "pypy", "it is for CPython, not pypy"),
        ("sysconfig.get_path", lambda name: "/nowhere", r"/nowhere/Python\.h is missing"),
    ],
)
def test_elsewhere(hook, tmp_path, monkeypatch, where, value, match):
    monkeypatch.setattr(where, value)
    with pytest.raises(hook.NotBuilt, match=match):
        hook.compile_core(ROOT, tmp_path / "built.so")
    assert not (tmp_path / "built.so").exists()


@compiles
def test_a_core_that_cannot_be_imported(hook, tree, tmp_path):
    text = SMALL_CORE.replace("PyModule_Create(&", "missing_symbol(&").replace(
        "PyMODINIT_FUNC", "PyObject *missing_symbol(void *);\nPyMODINIT_FUNC"
    )
    (tree / "transport/_native/core.c").write_text(text)
    with pytest.raises(hook.NotBuilt, match=r"importing with .*missing_symbol"):
        hook.compile_core(tree, tmp_path / f"_core{SUFFIX}")


@pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").is_file(), reason="needs Python.h"
)
def test_a_compiler_that_does_not_end(hook, tree, tmp_path, monkeypatch):
    """It is ended with all that it has started."""
    compiler = tmp_path / "cc"
    held = tmp_path / "held"
    os.mkfifo(held)
    compiler.write_text(f"#!/bin/sh\nsleep 1000 > {held} &\nwait\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(hook, "SECONDS", 0.5)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(hook.NotBuilt, match=r"compiling with .*/cc took over 0\.5 s"):
            hook.compile_core(tree, tmp_path / "built.so")
        os.set_blocking(reader, True)
        assert os.read(reader, 1) == b""  # at once or when the last writer has ended
    finally:
        os.close(reader)


def test_the_demo_installs_what_it_needs_and_no_more():
    """Without the linters, the tests and JAX, which take minutes."""
    said = subprocess.run(
        ["make", "--dry-run", "demo", "VENV=nowhere"],
        cwd=ROOT,
        env=os.environ | {"MAKEFLAGS": ""},
        check=True,
        capture_output=True,
        text=True,
        timeout=50,
    ).stdout
    (extras,) = re.findall(r"--editable '\.\[(.*)\]'", said)
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        re.match(r"[\w-]+", requirement)[0]
        for extra in extras.split(",")
        for requirement in optional["optional-dependencies"][extra]
    }
    used = {
        name.partition(".")[0]
        for path in (ROOT / "examples/digits_2d.py", *(ROOT / "examples/support").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    foreign = used - set(sys.stdlib_module_names) - {*PACKAGES, "numpy", "support"}
    assert wanted == {{"sklearn": "scikit-learn"}.get(name, name) for name in foreign}


def bounds_of(requirements):
    """Return each package's version bounds, without spaces: ``{"numpy": ">=1.26"}``."""
    return {
        re.match(r"[\w-]+", one)[0]: re.sub(r"^[\w-]+|\s", "", one)
        for one in requirements
        if isinstance(one, str)
    }


def test_the_conda_recipe_has_the_bounds_and_commands_of_pyproject():
    yaml = pytest.importorskip("yaml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text())
    assert recipe["package"]["name"] == project["name"]
    assert recipe["about"]["license"] == project["license"]
    needed = bounds_of(project["dependencies"]) | {"python": project["requires-python"]}
    assert bounds_of(recipe["requirements"]["run"]) == needed
    assert "python" in recipe["requirements"]["host"]  # without bounds, so that the channel's count
    below = project["requires-python"].removeprefix(">=")
    assert f'match(python, "<{below}")' in recipe["build"]["skip"]
    assert "VERSION" in recipe["package"]["version"]  # meshlib/__init__.py alone has the number
    commands = dict(line.split(" = ") for line in recipe["build"]["python"]["entry_points"])
    assert commands == project["scripts"]


def test_the_table_of_supported_versions_has_the_bounds_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs/reference/compatibility.md").read_text()
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert f"| Python | {pythons[0]} | {pythons[-1]} |" in page
    assert project["requires-python"] == f">={pythons[0]}"
    numpy = bounds_of(project["dependencies"])["numpy"].removeprefix(">=")
    assert f"| NumPy | {numpy} |" in page
    optional = project["optional-dependencies"]
    jax = bounds_of(optional["jax"])["jax"].removeprefix(">=")
    assert f"| JAX | {jax} |" in page
    torch = bounds_of(optional["torch"])["torch"].removeprefix(">=")
    assert f"| PyTorch | {torch} |" in page
    rows = versions.rows_of(page)
    assert [row.python for row in rows if row.tests == "all"] == pythons == list(PYTHONS)
    oldest = [row for row in rows if row.python == pythons[0]]
    assert [row.numpy for row in oldest if row.numpy != "newest"] == [f"{numpy}.0"]
    assert jax in {row.jax for row in oldest}


def test_a_row_of_the_table_is_an_environment():
    page = f"text\n\n{versions.HEADER}\n|---|\n| 3.12 | 1.26.0 | - | newest | `a b` | |\n\n| x |"
    (row,) = versions.rows_of(page)
    assert (row.name, row.tests) == ("3.12-numpy==1.26.0-torch", "a b")
    assert {"numpy==1.26.0", "torch", ".[torch]"} < set(row.requirements)
    with pytest.raises(ValueError, match="no table that begins with"):
        versions.rows_of("text")
