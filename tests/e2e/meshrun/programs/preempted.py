import os
import sys
import time

import numpy as np

import meshlib as dist
from meshlib.checkpoint import Checkpointer

dist.init_process_group()
rank = dist.get_rank()
state = {"step": 0, "x": np.zeros(2)}
with Checkpointer("checkpoints") as checkpoints:
    if checkpoints.latest() is not None:
        state = checkpoints.load(state)
    first = state["step"] + 1
    for step in range(first, first + 5 if first > 1 else 10**9):
        state = {"step": step, "x": state["x"] + dist.all_reduce(np.ones(2))}
        stops = dist.should_stop(step)
        if step == first:
            with open(f"pid-{rank}.partial", "w") as file:
                file.write(str(os.getpid()))
            os.rename(f"pid-{rank}.partial", f"pid-{rank}")
        if stops:
            time.sleep(float(os.environ.get("SLOW", "0")))
            checkpoints.save(state, step=step)
            print(f"stopped {step}", flush=True)
            break
assert state["x"].tolist() == [step * dist.get_world_size()] * 2
if not stops:
    print(f"went on from {first}", flush=True)
dist.destroy_process_group()
sys.exit(os.EX_TEMPFAIL if stops else 0)
