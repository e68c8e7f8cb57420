"""Small runs of the GPT of ``parallel.nn`` modules, with ranks as threads."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from numpy_gpt.config import Config
from numpy_gpt.run import train
from numpy_gpt.trainer import Trainer

import meshlib as dist
from meshlib.testing import run_ranks

FOLDER = Path(__file__).parent / "numpy_gpt"

EVERYTHING = os.environ.get("MESHLIB_TEST_MESHES") == "1"
"""True if all meshes are tried (``make test-meshes``: minutes), or the main ones."""

SMALL = {
    "vocabulary": 128,
    "layers": 2,
    "width": 8,
    "heads": 4,
    "kv_heads": 4,
    "hidden": 8,
    "context": 16,
    "expert_hidden": 8,
    "shared_hidden": 8,
    "characters": 20_000,
    "batch_size": 8,
    "microbatches": 1,
    "steps": 20,
    "warmup": 3,
    "lr": 3e-2,
    "every": 5,
    "dtype": '"float64"',
}


def write_config(directory, **settings):
    """Write its config with other settings, tiny ones by default; return its path."""
    text = (FOLDER / "gpt.toml").read_text()
    for name, value in (SMALL | settings).items():
        text, count = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value} ", text, flags=re.M)
        assert count == 1, name
    path = directory / "gpt.toml"
    path.write_text(text)
    return path


def some(cases, main):
    """Return the cases to be tried, by name; only those in ``main`` if not everything is."""
    assert all(one in cases for one in main)
    return [pytest.param(one, id=name_of(one)) for one in (cases if EVERYTHING else main)]


def name_of(dims):
    """Return how a test calls a mesh of ``dims``."""
    return ",".join(f"{name}={size}" for name, size in dims.items())


def run(path, dims, *, folder=None, stop_after=None):
    """Train on a mesh of ``dims``; return each rank's losses."""

    def program():
        mesh = dist.init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        return train(Trainer(Config(path), mesh), folder, stop_after)

    # Deadlines are for what hangs: ranks are many, and the machine may be busy.
    return run_ranks(program, int(np.prod(list(dims.values()))), timeout=200)
