"""Ranks ask for what there is no shared memory for."""

import sys

import numpy as np

import meshlib as dist

dist.init_process_group(backend="shm", timeout=60)
rank, what = dist.get_rank(), sys.argv[1]
try:
    if what == "array":
        dist.group.WORLD.empty(64 << 20)
    elif what == "reduction":
        dist.all_reduce(np.ones(1 << 20))
    elif rank == 0:
        dist.recv(np.ones(1 << 18), src=1)
    else:
        dist.send(np.ones(1 << 18), dst=0)
    print("all is well")
except dist.DistBackendError as error:
    print(error)
