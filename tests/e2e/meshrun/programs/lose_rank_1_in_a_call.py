"""Rank 1 dies, once a file says so, while rank 0 waits for it in a call."""

import os
import signal
import time

import numpy as np

import meshlib as dist

mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def waits_for_a_file():
    until = time.monotonic() + 60
    while not os.path.exists("go") and time.monotonic() < until:
        time.sleep(0.02)


if dist.get_rank() == 1:
    waits_for_a_file()
    os.kill(os.getpid(), signal.SIGKILL)
try:
    mesh.all_reduce(np.ones(10))
except dist.RankFailedError:
    open("lost", "w").close()
    while not os.path.exists("end"):
        time.sleep(0.02)
