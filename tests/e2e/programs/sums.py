"""Digests of what each rank got from sums of drawn numbers."""

import hashlib
import json
import sys

import ml_dtypes  # noqa: F401 (bfloat16 by name)
import numpy as np

import meshlib as dist

cases, backends = map(json.loads, sys.argv[1:])
found = []
for backend in backends:
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    for count, kind, name in cases:
        dtype, op = np.dtype(kind), getattr(dist.ReduceOp, name)
        x = np.random.default_rng(rank).standard_normal(count).astype(dtype)
        whole = dist.all_reduce(x.copy(), op)
        found.append(hashlib.sha256(whole.tobytes()).hexdigest())
        part = np.empty(count // size, dtype)
        dist.reduce_scatter_tensor(part, x[: count // size * size].copy(), op)
        assert part.tobytes() == whole[rank * part.size : (rank + 1) * part.size].tobytes()
        root = count % size
        dist.reduce(x, root, op)
        assert rank != root or x.tobytes() == whole.tobytes()
    dist.destroy_process_group()
print(json.dumps([rank, found]))
