"""Four ranks of context and tensor parallel learn as one process does."""

from functools import partial

import numpy as np

import meshlib as dist
from parallel import DistributedDataParallel, VocabParallelCrossEntropyLoss, parallelize
from parallel.context import context_parallel, split_sequence
from parallel.state import global_state
from tests.support.parallel.small_gpt import GPT, assert_close, sequence_parallel_plan, train

mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
alone = GPT()
expected = train(alone, steps=5)
for method in ("ring", "all_to_all"):
    model = parallelize(GPT(), mesh["tp"], sequence_parallel_plan())
    context_parallel(model, mesh["cp"], method=method)
    losses = train(
        DistributedDataParallel(model, mesh["cp"]),
        VocabParallelCrossEntropyLoss(mesh["tp"]),
        partial(split_sequence, mesh=mesh["cp"], zigzag=method == "ring"),
        steps=5,
    )
    losses = mesh["cp"].all_reduce(np.array(losses), op=dist.ReduceOp.AVG)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-9)
    state = global_state(model)["model"]
    whole = {path: getattr(x, "full_array", lambda x=x: x)() for path, x in state.items()}
    assert_close(whole, alone.state_dict())
print(f"rank {dist.get_rank()} agrees")
dist.destroy_process_group()
