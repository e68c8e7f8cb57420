"""Broadcasts, gathers, exchanges and reduce-scatters of many sizes have the right bits."""

import numpy as np
from joined import group, merged, rank, size

import meshlib as dist

ReduceOp = dist.ReduceOp


def values(of, to, count, dtype):
    at = np.arange(count) * 7 + of * 13 + to * 5 + count
    lowest = 0 if np.dtype(dtype).kind in "ub" else 5
    return (at % 11 - lowest).astype(dtype)


SHARE = (512 << 10) // (size - 1) // 64 * 64
PIECE = 256 << 10
around = [0, 1, 3, 5000]
around += [laps * SHARE // 4 + more for laps in (1, 2, 5) for more in (-1, 0, 1)]
# From here on results are written past the caches.
FAR = (8 << 20) // 4 + 3
around.append(FAR // size + 1)


def check(got, wanted, *what):
    assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes(), (rank, what)


for count in [*around, PIECE // 4 - 1, PIECE // 4, PIECE // 4 + 1, 5 * PIECE // 4 + 3, FAR]:
    for root in (0, size - 1):
        wanted = values(root, count, count, "f4")
        x = wanted.copy() if rank == root else np.zeros(count, "f4")
        assert dist.broadcast(x, root) is x
        check(x, wanted, "broadcast", count, root)
for count in around:
    # One's own part in place, every other time.
    out = np.zeros(count * size, "f4")
    own = values(rank, 0, count, "f4")
    if count % 2:
        out[rank * count : (rank + 1) * count] = own
        own = out[rank * count : (rank + 1) * count]
    dist.all_gather_into_tensor(out, own)
    check(out, np.concatenate([values(of, 0, count, "f4") for of in range(size)]), count)
    got = np.zeros(count * size, "f4")
    dist.all_to_all_single(
        got, np.concatenate([values(rank, to, count, "f4") for to in range(size)])
    )
    check(got, np.concatenate([values(of, rank, count, "f4") for of in range(size)]), count)
# Sizes that differ by member, some of one lap and some of several.
for scale in (1, 999, 70_001):
    counts = [(3 * r + 1) % 5 * scale for r in range(size)]
    outs = [np.zeros(count, "i2") for count in counts]
    dist.all_gather(outs, values(rank, 0, counts[rank], "i2"))
    for of, out in enumerate(outs):
        check(out, values(of, 0, counts[of], "i2"), "all_gather", scale, of)
    counts = [[(of * 2 + to * 3) % 4 * scale for to in range(size)] for of in range(size)]
    outs = [np.zeros(counts[of][rank], "c16") for of in range(size)]
    dist.all_to_all(outs, [values(rank, to, counts[rank][to], "c16") for to in range(size)])
    for of, out in enumerate(outs):
        check(out, values(of, rank, counts[of][rank], "c16"), "all_to_all", scale, of)

# Every dtype and op, in the order of addition, in place every other time.
combine = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
number = 0
for dtype in ("f4", "f8", "i4", "u4", "i8", "u8", "i1", "f2"):
    for op, ufunc in combine.items():
        if op is ReduceOp.AVG and dtype[0] != "f":
            continue
        for count in (1, 5000, SHARE // 8 + 3, 3 * SHARE // 4):
            number += 1
            if count > 5000 and dtype not in ("f4", "i8", "f2"):
                continue
            # Of sizes that make the order of the ranks count.
            parts = [
                (values(of, rank, count, "f8") * 1.1 ** (of if dtype[0] == "f" else 0)).astype(
                    dtype
                )
                for of in range(size)
            ]
            wide = "f4" if dtype == "f2" else dtype
            wanted = merged([part.astype(wide) for part in parts], ufunc)
            if op is ReduceOp.AVG:
                wanted = wanted / np.asarray(size, wide)
            whole = np.concatenate(
                [
                    (
                        values(rank, to, count, "f8") * 1.1 ** (rank if dtype[0] == "f" else 0)
                    ).astype(dtype)
                    for to in range(size)
                ]
            )
            out = np.zeros(count, dtype)
            if number % 2:
                out = whole[rank * count : (rank + 1) * count]
            dist.reduce_scatter_tensor(out, whole, op)
            check(out, wanted.astype(dtype), "reduce_scatter", dtype, op, count)
# A buffer that begins where no number should.
odd = np.zeros(4 * 100 + 1, "u1")[1:].view("f4")
odd[:] = values(rank, 0, 100, "f4")
out = np.zeros(100 * size, "f4")
dist.all_gather_into_tensor(out, odd)
check(out, np.concatenate([values(of, 0, 100, "f4") for of in range(size)]), "odd")
# Symmetric arrays, which are read in place, and private ones beside them.
for count in (10, 300_000, FAR if size == 2 else 7):
    own, out = group.empty(count, "f4"), group.empty(count * size, "f4")
    own[:] = values(rank, 0, count, "f4")
    wanted = np.concatenate([values(of, 0, count, "f4") for of in range(size)])
    for x in (own, own.copy()):
        out[:] = 0
        dist.all_gather_into_tensor(out, x)
        check(out, wanted, "symmetric", count)
    x = values(0, 1, count, "f4") if rank == 0 else np.zeros(count, "f4")
    dist.broadcast(x, 0)
    check(x, values(0, 1, count, "f4"), "beside symmetric", count)
print("same", flush=True)
dist.destroy_process_group()
