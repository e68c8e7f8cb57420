"""The packages' faces: what is public is exported, and nothing else is."""

import subprocess
import sys
import textwrap
import types

import pytest

import meshlib
import meshlib.api


def test_all_is_what_is_public():
    public = {
        name
        for name, value in vars(meshlib.api).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(meshlib.__all__) == public
    assert meshlib.__all__ == sorted(meshlib.__all__)


@pytest.mark.parametrize("name", meshlib.__all__)
def test_what_is_public_is_documented(name):
    value = getattr(meshlib, name)
    assert value.__doc__ or type(value).__doc__


def test_a_first_use_brings_all_names_and_no_name_is_a_modules():
    program = """
        import importlib.util, sys
        import meshlib, meshlib.launcher.cli
        assert "numpy" not in sys.modules
        assert not hasattr(meshlib, "all_reduced")
        from meshlib import *
        assert set(meshlib.__all__) <= set(dir(meshlib)) & set(globals())
        assert not [name for name in meshlib.__all__ if importlib.util.find_spec(f"meshlib.{name}")]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=30)


@pytest.mark.parametrize("module", ["meshlib.mesh_config", "meshlib.jit", "parallel.ddp"])
def test_any_module_may_be_the_first(module):
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, timeout=30)
