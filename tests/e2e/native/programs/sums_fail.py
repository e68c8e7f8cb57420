"""Small sums that disagree, or come late, are refused."""

import time

import numpy as np
from joined import group, rank, wait_for_failure

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of

dist.barrier()
dist.barrier()
assert call_queue_of(group).state.fast_path is not None


def expect(error, *texts):
    kind, message = type(error).__name__, str(error)
    assert all(text in message for text in texts), (kind, message)
    return kind


def fails(call):
    try:
        call()
    except dist.DistError as error:
        return error
    raise AssertionError("nothing was raised")


pair = [dist.new_group([0, 1]) for _ in range(3)]
for each in pair:
    for _ in range(2):
        dist.all_reduce(np.ones(2), group=each)
# Another dtype.
error = fails(lambda: dist.all_reduce(np.ones(2, ("f4", "f8")[rank]), group=pair[0]))
assert expect(error, "float32", "float64", __file__) == "CollectiveMismatchError"
# A rank that comes late, past what is worth looking for, and then one that does not come.
if rank:
    time.sleep(0.3)
x = np.ones(2)
assert dist.all_reduce(x, group=pair[1]) is x and x.tolist() == [2, 2]
if rank:
    time.sleep(0.3)
dist.barrier(pair[1])
pair[2].set_timeout(0.5)
if rank == 0:
    error = fails(lambda: dist.all_reduce(np.ones(2), group=pair[2]))
    assert expect(error, "rank 1") == "CollectiveTimeoutError"
else:
    wait_for_failure(pair[2])
    error = fails(lambda: dist.all_reduce(np.ones(2), group=pair[2]))
    assert expect(error, "rank 1") == "CollectiveTimeoutError"
assert call_queue_of(pair[2]).state.fast_path is None
print("raised", flush=True)
dist.destroy_process_group()
