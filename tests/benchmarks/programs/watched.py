"""Ranks that compute and call, and write down what each step took."""

import os
import sys
import time

import numpy as np

import meshlib as dist

calls, folder = int(sys.argv[1]), sys.argv[2]
mesh = dist.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
matrix = np.random.default_rng(0).standard_normal((160, 160))
gradient = np.ones(1000, np.float32)
done = np.zeros(1, np.int8)
with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
    while not done[0]:
        product = matrix
        for _ in range(60):
            product = matrix @ product
            product /= np.abs(product).max()
        for _ in range(calls):
            mesh.all_reduce(gradient, dist.ReduceOp.MAX)
        done[0] = os.path.exists(os.path.join(folder, "end"))
        mesh.all_reduce(done, dist.ReduceOp.MAX)
        print(time.monotonic(), time.thread_time(), time.process_time(), file=file)
