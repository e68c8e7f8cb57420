"""The packages' faces: what is public is exported, and nothing else is."""

import ast
import inspect
import pickle
import subprocess
import sys
import textwrap

import pytest

import meshlib


def test_editors_see_the_names_that_programs_get():
    (block,) = (
        node
        for node in ast.parse(inspect.getsource(meshlib)).body
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.ImportFrom)
    )
    shown = [(node.module, alias.name, alias.asname) for node in block.body for alias in node.names]
    homes = meshlib._HOMES.items()
    assert shown == [(home, name, name) for home, names in homes for name in names.split()]
    assert meshlib.__all__ == sorted(name for _, name, _ in shown)


def test_dir_shows_the_public_names_alone():
    assert [name for name in dir(meshlib) if not name.startswith("_")] == meshlib.__all__


def test_a_function_is_meshlibs_and_its_source_is_found():
    assert meshlib.all_reduce.__module__ == "meshlib"
    assert pickle.loads(pickle.dumps(meshlib.all_reduce)) is meshlib.all_reduce
    assert "def all_reduce(" in inspect.getsource(meshlib.all_reduce)
    assert "class DeviceMesh(" in inspect.getsource(meshlib.DeviceMesh)


def test_no_name_is_a_modules():
    program = """
        import importlib.util, sys
        import meshlib, meshlib._launcher.__main__
        assert "numpy" not in sys.modules
        assert not hasattr(meshlib, "all_reduced")
        from meshlib import *
        assert set(meshlib.__all__) <= set(dir(meshlib)) & set(globals())
        assert not [name for name in meshlib.__all__ if importlib.util.find_spec(f"meshlib.{name}")]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=30)


def test_what_a_program_may_do_without_comes_at_its_first_use():
    program = """
        import sys
        import meshlib
        assert callable(meshlib.all_reduce)
        mine = meshlib.all_reduce = object()
        later = {
            "meshlib._c10d.functions.gathered", "meshlib._job.starting.init",
            "meshlib._mesh.layout", "meshlib.sharding", "meshlib._trace.dump",
        }
        assert not later & set(sys.modules)
        assert meshlib.DeviceMesh is sys.modules["meshlib._mesh.device_mesh"].DeviceMesh
        assert "meshlib.sharding" not in sys.modules
        assert meshlib.Sharding is sys.modules["meshlib.sharding"].Sharding
        assert meshlib.all_reduce is mine
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=30)


@pytest.mark.parametrize(
    ("name", "meant"), [("allreduce", "'all_reduce'"), ("DeviceMash", "'DeviceMesh'")]
)
def test_a_name_that_is_nearly_one_says_so(name, meant):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean {meant}"):
        getattr(meshlib, name)


@pytest.mark.parametrize("statement", ["import meshlib", "from meshlib.testing import run_ranks"])
@pytest.mark.parametrize("file", ["transport.py", "transport/__init__.py"])
def test_a_users_file_in_the_way_is_named(tmp_path, file, statement):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    (tmp_path / "train.py").write_text(statement)
    ran = subprocess.run(
        [sys.executable, tmp_path / "train.py"],
        capture_output=True,
        check=False,
        text=True,
        timeout=30,
    )
    assert f"ImportError: {path} is in the way of meshlib's package 'transport'" in ran.stderr


def test_native_windows_is_refused():
    program = "import sys; sys.platform = 'win32'; import meshlib"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "ImportError: meshlib does not run on native Windows: use it in WSL" in ran.stderr


@pytest.mark.parametrize("module", ["meshlib", "meshlib._launcher"])
def test_a_command_may_be_run_as_a_module(module):
    printed = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
    ).stdout
    assert printed.split()[1] == meshlib.__version__


@pytest.mark.parametrize("module", ["meshlib._mesh.config", "meshlib.jit", "parallel.ddp"])
def test_any_module_may_be_the_first(module):
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, timeout=30)
