"""A rank in the phase of its life that the argument names."""

import os
import sys
import time

import numpy as np

import meshlib as dist


def ready():
    path = "ready-" + os.environ["RANK"]
    with open(path + ".partial", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".partial", path)


def init():
    if os.environ["RANK"] == "0":
        ready()
        time.sleep(600)  # the others wait for it
    ready()
    dist.init_process_group()


def collective():
    dist.init_process_group()
    x = np.ones(8)
    dist.all_reduce(x)
    ready()
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.all_reduce(x)


def outstanding():
    dist.init_process_group()
    x = np.ones(8)
    dist.all_reduce(x)
    if dist.get_rank() != 0:
        for _ in range(3):
            dist.all_reduce(x, async_op=True)
    ready()
    time.sleep(600)


def receive():
    dist.init_process_group()
    dist.barrier()
    ready()
    dist.recv(np.ones(8), src=(dist.get_rank() + 1) % dist.get_world_size())


globals()[sys.argv[1]]()
