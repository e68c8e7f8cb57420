"""Two ranks of an installed wheel share memory: what ``make test-wheel`` runs."""

import numpy as np

import meshlib as dist
from transport._native import __file__ as installed

dist.init_process_group(backend="shm", timeout=60)
assert "site-packages" in installed, installed
x = np.arange(100_000.0)
dist.all_reduce(x)
assert (x == 2 * np.arange(100_000.0)).all()
if dist.get_rank() == 0:
    print(f"{installed}: two ranks share memory")
dist.destroy_process_group()
