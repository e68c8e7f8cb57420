"""The package's face: what it shows is there, documented, and nothing else is needed."""

import importlib
import inspect
import pkgutil

import pytest

import parallel

ROOMS = [
    room.name
    for room in pkgutil.iter_modules(parallel.__path__, "parallel.")
    if room.ispkg and not room.name.startswith("parallel._")
]
PACKAGES = [parallel, *map(importlib.import_module, ROOMS)]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_public_names_exist_once_and_are_documented(package):
    assert len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_the_readmes_names():
    assert {"DistributedDataParallel", "DistributedSampler"} <= set(parallel.__all__)


def test_torchs_data_parallel_names_the_one_to_use():
    with pytest.raises(ImportError, match="expected DistributedDataParallel"):
        from parallel import DataParallel  # noqa: F401
    with pytest.raises(AttributeError, match="'parallel' has no attribute 'Nothing'"):
        _ = parallel.Nothing
