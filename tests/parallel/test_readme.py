"""The programs in the README run as they stand there, given a dataset."""

import re
from pathlib import Path

import numpy as np

from meshlib.testing import run_ranks

README = Path(__file__).parents[2] / "README.md"


def blocks():
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_mesh_and_the_training_run_on_four_ranks():
    mesh, training, _ = blocks()

    def batches(sampler):
        indices = np.array(list(sampler))
        return np.split(indices, 2)

    def program():
        rng = np.random.default_rng(1)
        dataset = range(16)
        names = {
            "dataset": dataset,
            "batches": batches,
            "images": rng.random((16, 64), np.float32),
            "labels": rng.integers(0, 10, 16),
        }
        exec(mesh, names)
        exec(training, names)
        return [p.data.tolist() for p in names["model"].parameters()]

    first, *others = run_ranks(program, 4)
    assert all(other == first for other in others)


def test_ranks_in_one_process():
    mesh, _, threads = blocks()
    imports = "\n".join(line for line in mesh.splitlines() if line.startswith("import"))
    exec(imports + "\n" + threads, {})
