"""Tests that need a GPU: all of them are skipped, saying why, if there is none."""

from __future__ import annotations

import functools
import warnings

import pytest

from transport._cuda import cuda_driver
from transport._errors import DistBackendError


@functools.cache
def why_not() -> str | None:
    """The reason why this machine cannot run them, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # what CuPy has to say is not an error of ours
            count = cuda_driver().device_count()
    except DistBackendError as error:
        return str(error)
    return None if count else "no GPU is visible"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and (reason := why_not()) is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
