"""The package's face: what it shows is there, documented, and nothing else is needed."""

import inspect

import pytest

import parallel
from parallel import (
    comm_hooks,
    context,
    data_parallel,
    ddp,
    join,
    nn,
    optim,
    samplers,
    tensor_parallel,
    zero,
)

PACKAGES = [
    parallel,
    comm_hooks,
    context,
    data_parallel,
    ddp,
    join,
    nn,
    optim,
    samplers,
    tensor_parallel,
    zero,
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_public_names_exist_once_and_are_documented(package):
    assert len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_the_readmes_names():
    assert {"DistributedDataParallel", "DistributedSampler"} <= set(parallel.__all__)
