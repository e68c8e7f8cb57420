"""Exchanges that disagree, or come late, are refused."""

import os
import time

import numpy as np
from joined import rank, wait_for_failure

import meshlib as dist


def fails(call, *arguments):
    begin = time.monotonic()
    try:
        call(*arguments)
    except dist.DistError as raised:
        return str(raised), time.monotonic() - begin
    raise AssertionError("nothing was raised")


def exchange(count, group, expected=None):
    outs = [np.zeros(count if expected is None else expected, "f4") for _ in range(2)]
    outs[rank] = np.zeros(count, "f4")
    dist.all_to_all(outs, [np.ones(count, "f4") for _ in range(2)], group=group)


groups = [dist.new_group([0, 1]) for _ in range(6)]
for group in groups:
    exchange(5, group)
    x = np.zeros(300_000, "f4")
    dist.broadcast(x, 0, group=group)
# Sizes that disagree, of one chunk and of several.
for group, count in zip(groups[:2], (5, 300_000), strict=True):
    text, took = fails(exchange, count, group, count - (rank == 0))
    assert "rank 1" in text or "rank 0" in text, text
    assert "bytes" in text, text


# Another call than the root's, whose data is there before anybody has compared it.
def differ():
    dist.broadcast(np.ones(3, ("f4", "f8")[rank]), 0, group=groups[2])
    dist.barrier(groups[2])


text, took = fails(differ)
assert "float32" in text and "float64" in text, text
# Somebody comes late, and then not at all.
for make in (
    lambda: exchange(300_000, groups[3]),
    lambda: dist.broadcast(np.ones(600_000, "f4"), 0, group=groups[3]),
):
    if rank:
        time.sleep(0.2)
    make()
groups[3].set_timeout(0.5)
groups[4].set_timeout(0.5)
if rank == 0:
    text, took = fails(lambda: exchange(300_000, groups[3]))
    assert "rank 1" in text and took > 0.4, (text, took)
    text, took = fails(lambda: dist.broadcast(np.ones(600_000, "f4"), 0, group=groups[4]))
    assert "rank 1" in text and took > 0.4, (text, took)
else:
    wait_for_failure(groups[3])
    wait_for_failure(groups[4])
print("raised", flush=True)
os._exit(0)
