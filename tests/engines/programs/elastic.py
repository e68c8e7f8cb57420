"""An elastic mesh loses a rank in step 3, when its job is requeued."""

import os
import time
from functools import partial

import numpy as np

import meshlib as dist
from parallel.elastic import ElasticMesh

dist.init_process_group(timeout=100)
mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("dp",))
me = int(os.environ["RANK"])
with ElasticMesh(mesh, "dp", min_size=2) as elastic:
    state = {"sum": np.zeros(1)}
    for step in elastic.steps(state, 6):
        with step as mesh:
            if (me, step.number) == (1, 3):
                print("lose me", flush=True)
                time.sleep(100)
            gradient = mesh.all_reduce(np.full(1, step.number + 1.0))
            step.on_commit(partial(np.add, state["sum"], gradient, out=state["sum"]))
    print(f"rank {me} of {elastic.mesh.mesh.tolist()}: {state['sum'][0]:g}", flush=True)
