"""The data of most examples: scikit-learn's handwritten digits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images (1797, 64), float64 from 0 to 16, and the labels (1797,), int64.

    These are the arrays of ``sklearn.datasets.load_digits(return_X_y=True)``, read from the same
    file without the slow import of scikit-learn.
    """
    package = find_spec("sklearn")
    path = Path(package.origin or "").parent / "datasets/data/digits.csv.gz" if package else None
    if path is None or not path.exists():
        from sklearn.datasets import load_digits

        return load_digits(return_X_y=True)
    table = np.loadtxt(path, delimiter=",")
    return table[:, :-1], table[:, -1].astype(int)
