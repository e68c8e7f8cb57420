"""Four ranks of FSDP, HSDP and tensor parallel train as one process does."""

from functools import partial

import meshlib as dist
from tests.support.parallel.fsdp_training import MODELS, assert_equal, shard, train, whole

mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
flat = mesh.flatten("dp_shard")
for make, batches in MODELS.values():
    expected = make()
    train(expected, batches)
    for over in (flat, mesh["a", "b"]):
        for reshard in (None, True):
            model = shard(make(), over, reshard_after_forward=reshard)
            train(model, batches, dist.get_rank(), 4)
            assert_equal(whole(model.state_dict()), expected.state_dict())
expected = expected.state_dict()
model = shard(make(tp=mesh["b"]), mesh["a"])
train(model, batches, mesh.get_local_rank("a"), 2)
assert_equal(whole(model.state_dict()), expected)

# Large enough to be gathered and reduced where it is, in symmetric memory.
large = partial(make, blocks=1, width=256, dtype="f8")
model, alone = shard(large(), flat), large()
train(model, batches, dist.get_rank(), 4, steps=2)
train(alone, batches, steps=2)
assert_equal(whole(model.state_dict()), alone.state_dict(), 1e-9)  # rounded in another order
print(f"rank {dist.get_rank()} agrees")
dist.destroy_process_group()
