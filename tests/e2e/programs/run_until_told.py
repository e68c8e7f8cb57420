"""A mesh of four with a slow rank runs until a file tells it to end, or rank 2 to die."""

import os
import signal
import time

import numpy as np

import meshlib as dist

mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
slow = int(os.environ["SLOW"])


def compute():
    time.sleep(0.2 if dist.get_rank() == slow else 0.05)


try:
    while not os.path.exists("end"):
        if dist.get_rank() == 2 and os.path.exists("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        compute()
        mesh["tp"].all_reduce(np.ones(50_000, np.float32))
        mesh["dp"].all_reduce(np.ones(200_000, np.float32))
        done = np.array([os.path.exists("end")])
        dist.all_reduce(done, dist.ReduceOp.MAX)
        if done[0]:
            break
except dist.RankFailedError:
    while not os.path.exists("end"):
        time.sleep(0.02)
