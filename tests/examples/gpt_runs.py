"""Small runs of ``examples/gpt``, with ranks as threads."""

import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from gpt_config import Config
from gpt_trainer import Trainer

import meshlib as dist
from meshlib.checkpoint import Checkpointer
from meshlib.testing import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt"

EVERYTHING = os.environ.get("MESHLIB_TEST_MESHES") == "1"
"""True if all meshes are tried (``make test-meshes``: half an hour), or the main ones."""

SMALL = {
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
    "every": 3,
    "dtype": '"float64"',
}


def write_config(directory, **settings):
    """Write the example's config with other settings, tiny ones by default; return its path."""
    text = (EXAMPLE / "gpt.toml").read_text()
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


def run(path, dims, steps, folder=None):
    """Train on a mesh of ``dims``; return each rank's losses, from a checkpoint in ``folder`` on.

    With a folder, what there is at the end is saved in it.
    """

    def program():
        mesh = dist.init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        trainer, first = Trainer(Config(path), mesh), 0
        files = Checkpointer(folder) if folder else None
        if files is not None and files.latest() is not None:
            first = files.latest()
            saved = files.load(trainer.states.layout(trainer.tree))
            trainer.take(*trainer.states.restore(trainer.tree, saved))
        losses = [trainer.step(number) for number in range(first, steps)]
        jax.block_until_ready(trainer.tree)  # the last update makes calls
        if files is not None:
            files.save(trainer.states.state(trainer.tree), step=steps)
            files.close()
        return losses

    # Deadlines are for what hangs: ranks are many, each compiles, and the machine may be busy.
    return run_ranks(program, int(np.prod(list(dims.values()))), timeout=500)
