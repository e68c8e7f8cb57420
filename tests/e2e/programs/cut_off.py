"""Ranks that call on and on say how and when a call failed."""

import os
import sys
import time

import numpy as np

import meshlib as dist

dist.init_process_group(sys.argv[1], timeout=6)
x = np.ones(1000)
dist.all_reduce(x)
if dist.get_rank() == 1:
    open("running", "w").close()
begin = time.monotonic()
try:
    while time.monotonic() - begin < 60:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        begin = time.monotonic()
        time.sleep(0.01)
except dist.DistError as error:
    rank, seconds = dist.get_rank(), time.monotonic() - begin
    print(f"rank {rank} {type(error).__name__} {seconds:.1f} s: {error}", flush=True)
    os._exit(1)
