"""Small sums of every dtype and op, and what Python is asked for: results and records."""

import threading

import numpy as np
from joined import AVG, MAX, MIN, PRODUCT, SUM, group, merged, rank, size

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._job.current import current_world

dist.barrier()
dist.barrier()
assert call_queue_of(group).state.fast_path is not None


def values(number, of, dtype, count):
    at = np.arange(count) * 7 + number * 13 + of * 5
    lowest = 0 if np.dtype(dtype).kind == "u" else 5
    return (at % 11 - lowest).astype(dtype)


number = 0
combine = {SUM: np.add, AVG: np.add, PRODUCT: np.multiply, MIN: np.minimum, MAX: np.maximum}
for dtype in ("f4", "f8", "i4", "u4", "i8", "u8", "i1", "?", "f2", "c8"):
    for op, ufunc in combine.items():
        if (op is AVG and dtype[0] in "iu?") or (dtype in ("?", "c8") and op is not SUM):
            continue
        for count in (1, 2, 3, 1000, 4096, 5000, 200_000):
            if count == 200_000 and op is not SUM:
                continue  # what is so long is cut up before anyone looks at the op
            number += 1
            x = values(number, rank, dtype, count)
            parts = [values(number, of, dtype, count) for of in range(size)]
            wide = "f4" if dtype == "f2" else dtype
            expected = merged([part.astype(wide) for part in parts], ufunc)
            if op is AVG:
                expected = expected / np.asarray(size, expected.dtype)
            assert dist.all_reduce(x, op) is x
            assert np.array_equal(x, expected.astype(dtype)), (dtype, op, count)
big = np.array([2**31 - 1, -(2**31)], "i4")
dist.all_reduce(big)
assert big.tolist() == np.array([(2**31 - 1) * size, -(2**31) * size]).astype("i4").tolist()
# What is not the usual case: it goes Python's way, and the order is kept.
turned = np.arange(6.0).reshape(2, 3).T
dist.all_reduce(turned)
assert np.array_equal(turned, np.arange(6.0).reshape(2, 3).T * size)
works = [dist.all_reduce(np.full(3, float(i)), async_op=True) for i in range(5)]
x = np.ones(3)
dist.all_reduce(x)
assert x.tolist() == [size] * 3
assert [work.result()[0] for work in works] == [i * size for i in range(5)]
locked = np.ones(2)
locked.flags.writeable = False
try:
    dist.all_reduce(locked)
except TypeError as error:
    assert "read-only" in str(error)
else:
    raise AssertionError
swapped = np.ones(2, ">f4")
try:
    dist.all_reduce(swapped)
except TypeError as error:
    assert "native byte order" in str(error)
else:
    raise AssertionError
# Several threads: each call is made once, whoever comes first.
totals = []


def many():
    x = np.ones(1)
    for _ in range(200):
        dist.all_reduce(x, MAX)
    totals.append(x[0])


threads = [threading.Thread(target=many) for _ in range(3)]
[t.start() for t in threads]
[t.join() for t in threads]
assert totals == [1.0] * 3
calls = current_world().recorder.records()
last = call_queue_of(group).state.order.sequence
assert [c.header.sequence for c in calls] == list(range(1, last + 1))[-len(calls) :]
assert all(c.ended and not c.error for c in calls[-600:])  # those before: refused, some of them
assert all(c.site.startswith(__file__) for c in calls), calls[-1].site
print("same", flush=True)
dist.destroy_process_group()
