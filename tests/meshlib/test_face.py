"""The packages' faces: what is public is exported, and nothing else is."""

import types

import pytest

import meshlib


def test_all_is_what_is_public():
    public = {
        name
        for name, value in vars(meshlib).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(meshlib.__all__) == public
    assert meshlib.__all__ == sorted(meshlib.__all__)


@pytest.mark.parametrize("name", meshlib.__all__)
def test_what_is_public_is_documented(name):
    value = getattr(meshlib, name)
    assert value.__doc__ or type(value).__doc__
