"""Messages of many sizes, by tags, in the background and past a full ring."""

import time

import numpy as np
from joined import rank

import meshlib as dist

sizes = [0, 1, 63, 4095, 4096, 16384, 16385, 32768, 65537, (1 << 20) - 64, 1 << 20, 3_000_001]


def values(size, seed):
    return ((np.arange(size, dtype=np.int64) * 31 + seed) % 253).astype(np.uint8)


for late in (None, 0, 1):
    for size in sizes:
        got = np.zeros(size, np.uint8)
        if late == rank:
            time.sleep(0.002)
        if rank == 0:
            dist.send(values(size, 1), 1)
            dist.recv(got, 1)
        else:
            dist.recv(got, 0)
            dist.send(values(size, 2), 0)
        assert np.array_equal(got, values(size, 2 - rank)), (late, size)
# By tags, in another order than they were sent in; what does not fit is refused.
x = np.arange(5000.0)
if rank == 0:
    for tag in (3, 2, 1):
        dist.send(x[tag:], 1, tag=tag)
else:
    for tag in (1, 3, 2):
        got = np.zeros_like(x[tag:])
        if tag == 3:
            try:
                dist.recv(np.zeros(3), 0, tag=tag)
            except dist.CollectiveMismatchError as error:
                assert "4997 elements" in str(error), error
            else:
                raise AssertionError
            continue
        assert dist.recv(got, 0 if tag == 1 else None, tag=tag) == 0
        assert np.array_equal(got, x[tag:])
# Both send before either receives, in the background; by tags in another order.
works = [dist.isend(values(size, rank), 1 - rank, tag=size) for size in sizes]
arrays = [np.zeros(size, np.uint8) for size in sizes]
works += [
    dist.irecv(array, 1 - rank, tag=size)
    for size, array in reversed(list(zip(sizes, arrays, strict=True)))
]
for work in works:
    work.wait()
for size, array in zip(sizes, arrays, strict=True):
    assert np.array_equal(array, values(size, 1 - rank)), size
# A sender that waits for room sleeps, and is woken.
if rank == 0:
    for i in range(12):
        dist.send(values(1 << 20, i), 1)
else:
    time.sleep(0.1)
    got = np.zeros(1 << 20, np.uint8)
    for i in range(12):
        dist.recv(got)
        assert np.array_equal(got, values(1 << 20, i)), i
dist.barrier()
print("fine", flush=True)
dist.destroy_process_group()
