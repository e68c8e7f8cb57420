"""Ctrl-C in a small sum, which the other rank is told of."""

import numpy as np
from joined import group, interrupt_soon, rank, wait_for_failure

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of

dist.barrier()
dist.barrier()
assert call_queue_of(group).state.fast_path is not None

if rank == 0:
    interrupt_soon()
    try:
        dist.all_reduce(np.ones(2))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    assert call_queue_of(group).state.fast_path is None
else:
    wait_for_failure(group)
    try:
        dist.all_reduce(np.ones(2))
    except dist.RankFailedError as error:
        print("raised" if "KeyboardInterrupt" in str(error) else error, flush=True)
dist.destroy_process_group()
