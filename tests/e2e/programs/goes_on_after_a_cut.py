"""Sums and messages go on until a file tells their ranks to stop."""

import os
import sys

import numpy as np

import meshlib as dist

dist.init_process_group(sys.argv[1], timeout=60)
rank = dist.get_rank()
x = np.ones(200_000)
received = np.empty(3000)
calls = 0
while True:
    assert dist.all_reduce(x.copy())[-1] == 2
    if rank == 0:
        dist.send(np.full(3000, calls, np.float64), 1)
    else:
        dist.recv(received, 0)
        assert (received == calls).all()
    calls += 1
    stop = np.array([os.path.exists("plugged in")])
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if calls == 10 and rank == 1:
        open("running", "w").close()
    if stop[0]:
        break
print(f"rank {rank} made {calls} calls")
dist.destroy_process_group()
