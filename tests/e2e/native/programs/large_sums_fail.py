"""Large sums that disagree, come late or are interrupted are refused."""

import numpy as np
from joined import PRODUCT, SUM, interrupt_soon, rank, wait_for_failure

import meshlib as dist


def fails(call):
    try:
        call()
    except dist.DistError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


large = np.ones(400_000, "f4")
groups = [dist.new_group([0, 1]) for _ in range(3)]
for each in groups:
    dist.all_reduce(large.copy(), group=each)
kind, message = fails(lambda: dist.all_reduce(large, (SUM, PRODUCT)[rank], group=groups[0]))
assert kind == "CollectiveMismatchError" and "PRODUCT" in message, message
groups[1].set_timeout(0.4)
if rank:
    wait_for_failure(groups[1])
kind, message = fails(lambda: dist.all_reduce(large, group=groups[1]))
assert kind == "CollectiveTimeoutError" and "rank 1" in message, message

# What Python is asked for while others come late: it waits, and may be interrupted.
if rank == 0:
    interrupt_soon()
    try:
        dist.all_reduce(large, group=groups[2])
    except KeyboardInterrupt:
        print("interrupted", flush=True)
else:
    wait_for_failure(groups[2])
    kind, message = fails(lambda: dist.all_reduce(large, group=groups[2]))
    assert "KeyboardInterrupt" in message, message
    print("raised", flush=True)
dist.destroy_process_group()
