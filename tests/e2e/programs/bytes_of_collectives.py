"""The bytes that a host's network card sends for each collective, with checked results."""

import json
import os
import sys
from pathlib import Path

import numpy as np

import meshlib as dist

backend, ranks = sys.argv[1], int(os.environ["WORLD_SIZE"])
dist.init_process_group(backend)
rank = dist.get_rank()
count = 1 << 20
x = np.arange(count, dtype=np.float32) % 97 + rank
expected = (np.arange(count, dtype=np.float32) % 97) * ranks + sum(range(ranks))
parts = [np.empty(count // 4, np.float32) for _ in range(ranks)]


def all_reduce():
    y = x.copy()
    dist.all_reduce(y)
    assert np.array_equal(y, expected)


def broadcast():
    y = x.copy()
    dist.broadcast(y, 1)
    assert np.array_equal(y, x - rank + 1)


def all_gather():
    dist.all_gather(parts, np.full(count // 4, rank, np.float32))
    assert all((part == i).all() for i, part in enumerate(parts))


def reduce_scatter():
    y = np.empty(count // 4, np.float32)
    dist.reduce_scatter(y, [np.full(count // 4, i + rank, np.float32) for i in range(ranks)])
    assert (y == ranks * rank + sum(range(ranks))).all()


def sent():
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.strip().partition(":")
        if name == "eth0":
            return int(numbers.split()[8])
    raise LookupError("this host has no eth0")


found = {}
for call in (all_reduce, broadcast, all_gather, reduce_scatter):
    call()
    dist.barrier()
    before = sent()
    dist.barrier()
    for _ in range(4):
        call()
    dist.barrier()
    found[call.__name__] = (sent() - before) / 4
if rank % 2 == 0:
    print(json.dumps(found))
dist.destroy_process_group()
