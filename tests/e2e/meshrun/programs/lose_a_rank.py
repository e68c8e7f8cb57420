"""An elastic mesh trains on when rank 1 is lost in step 2."""

import os
import signal
import sys

import numpy as np

import meshlib as dist
from parallel import DistributedDataParallel, nn, optim
from parallel.elastic import ElasticBatches, ElasticMesh

signal_name, until = sys.argv[1], 6
dist.init_process_group(timeout=50)
mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
me = int(os.environ["RANK"])
with ElasticMesh(mesh, "dp", min_size=3 if signal_name != "none" else 2) as elastic:
    net = nn.Linear(4, 1, rng=np.random.default_rng(7))
    model = DistributedDataParallel(net, elastic.mesh["dp"])
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "own": np.full(3, me)}
    for step in elastic.steps(state, until, batches=ElasticBatches(30, 12)):
        with step as mesh:
            if me == 1 and step.number == 2:
                if signal_name == "none":
                    raise ZeroDivisionError
                os.kill(os.getpid(), getattr(signal, signal_name))
            x = np.eye(4, dtype=np.float32)[step.share.samples % 4]
            model.backward(step.share.weight * (model(x) - 1) / len(x))
            step.on_commit(optimizer.step)
            step.on_commit(optimizer.zero_grad)
    values = b"".join(p.data.tobytes() for p in net.parameters()).hex()
    print(f"rank {me} ends in {mesh.mesh.tolist()} after {elastic.committed}: {values}", flush=True)
