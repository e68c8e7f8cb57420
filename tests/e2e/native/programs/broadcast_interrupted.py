"""Ctrl-C in a broadcast, which the other rank is told of."""

import numpy as np
from joined import group, interrupt_soon, rank, wait_for_failure

import meshlib as dist

dist.barrier()
x = np.ones(600_000)
if rank == 0:
    interrupt_soon()
    try:
        dist.broadcast(x, 0)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
else:
    wait_for_failure(group)
    try:
        dist.broadcast(x, 0)
    except dist.RankFailedError as error:
        print("raised" if "KeyboardInterrupt" in str(error) else error, flush=True)
dist.destroy_process_group()
