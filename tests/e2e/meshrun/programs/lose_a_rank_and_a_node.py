"""An elastic mesh over three nodes loses a rank, then a node."""

import os
import signal
from functools import partial

import numpy as np

import meshlib as dist
from parallel.elastic import ElasticMesh

dist.init_process_group(timeout=50)
mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("dp",))
me = int(os.environ["RANK"])
with ElasticMesh(mesh, "dp", min_size=3) as elastic:
    state = {"sum": np.zeros(3)}
    for step in elastic.steps(state, 8):
        with step as mesh:
            if (me, step.number) == (2, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            if (me, step.number) == (1, 4):
                os.kill(os.getppid(), signal.SIGKILL)  # its launcher: the node is gone
                signal.pause()
            gradient = mesh.all_reduce(np.full(3, step.number + 1.0))
            step.on_commit(partial(np.add, state["sum"], gradient, out=state["sum"]))
    node = os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"]
    print(me, *node, elastic.mesh.mesh.tolist(), *state["sum"].astype(int), flush=True)
