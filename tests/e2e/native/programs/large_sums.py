"""Large sums have NumPy's bits, in all sorts of arrays and orders of calls."""

import random
import time

import numpy as np
from joined import AVG, MAX, MIN, PRODUCT, SUM, group, merged, rank, size

import meshlib as dist

BLOCK = 512 << 10

np.seterr(all="ignore")
combine = {SUM: np.add, AVG: np.add, PRODUCT: np.multiply, MIN: np.minimum, MAX: np.maximum}
noise = np.random.default_rng(11).integers(0, 256, 4 * BLOCK, np.uint8)


def parts_of(number, dtype, count):
    # The same on all ranks, and every bit counts.
    for of in range(size):
        bits = np.roll(noise, 64 * (7 * number + 3 * of))[: count * np.dtype(dtype).itemsize]
        if dtype in ("f4", "f8"):
            yield (bits.view("i" + dtype[1]) >> 7).astype(dtype)
        else:
            yield bits.copy().view(dtype)


def reduced(parts, op):
    total = merged(parts, combine[op])
    return total / total.dtype.type(size) if op is AVG else total


room = group.empty(3 * BLOCK + 1024, np.uint8)
number = 0
for dtype in ("f4", "f8", "i4", "u4", "i8", "u8", "i2"):
    full = BLOCK // np.dtype(dtype).itemsize
    for op in combine:
        if op is AVG and dtype[0] != "f":
            continue
        for count in (full - 1, 2 * full + 19):
            number += 1
            parts = list(parts_of(number, dtype, count))
            wanted = reduced(parts, op).tobytes()
            x = parts[rank].copy()
            assert dist.all_reduce(x, op) is x
            assert x.tobytes() == wanted, (dtype, op, count)
            if number % 3 == 0:
                x = room[: parts[rank].nbytes].view(dtype)
                x[:] = parts[rank]
                dist.all_reduce(x, op)
                assert x.tobytes() == wanted, (dtype, op, count, "symmetric")
# One member's array alone is symmetric; one that is not aligned; and several calls at once.
for who in range(size):
    x = room[: 4 * 300_001].view("f4") if rank == who else np.empty(300_001, "f4")
    x[:] = rank
    dist.all_reduce(x)
    assert (x == sum(range(size))).all()
odd = np.zeros(4 * 300_000 + 1, np.uint8)[1:].view("f4")
odd[:] = rank + 1
dist.all_reduce(odd)
assert (odd == sum(range(size + 1))).all()
arrays = [np.full(150_000 + i, float(i)) for i in range(4)]
works = [dist.all_reduce(array, async_op=True) for array in arrays]
x = np.ones(200_000)
dist.all_reduce(x)
[work.wait() for work in works]
assert (x == size).all() and all((a == i * size).all() for i, a in enumerate(arrays))
# Calls of all sorts, one after the other, with members that come late.
same, own = random.Random(1), random.Random(rank)
for number in range(120):
    kind, count = same.randrange(4), same.choice((2, 3000, 40_000, 140_000, 300_000))
    if own.random() < 0.1:
        time.sleep(0.001)
    x = np.arange(number, number + count, dtype="f4") + rank
    if kind == 3:
        dist.broadcast(x, src=number % size)
        assert (x == np.arange(number, number + count, dtype="f4") + number % size).all()
    else:
        dist.all_reduce(x, MAX if kind == 2 else SUM)
        wanted = np.arange(number, number + count, dtype="f8") + (size - 1 if kind == 2 else 0)
        if kind != 2:
            wanted = wanted * size + sum(range(size))
        assert (x == wanted).all(), (number, kind, count)
print("same", flush=True)
dist.destroy_process_group()
