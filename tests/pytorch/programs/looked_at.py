"""A world of one whose calls are looked at: by PyTorch's profiler, and by hooks of its own."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

dist.init_process_group("meshlib", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
with profile() as profiled:
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    dist.all_gather_single(torch.ones(4), torch.ones(4))
    dist.barrier()
    assert dist.barrier(async_op=True).timeout == timedelta(minutes=30)
events = {event.key: event.count for event in profiled.key_averages()}
found = {name: count for name, count in events.items() if name.startswith("meshlib:")}
assert found == {"meshlib:all_reduce": 2, "meshlib:all_gather_single": 1, "meshlib:barrier": 2}, (
    found
)

for name in ("split_group", "merge_remote_group", "reconfigure", "new_window"):
    with pytest.raises(NotImplementedError, match=rf"has no {name}\(\)"):
        getattr(group, name)()

if hasattr(dist.ProcessGroup, "register_pre_hook"):  # PyTorch 2.14
    names = torch._C._distributed_c10d.HookOpName
    gathered = "ALLGATHER_BASE" if hasattr(names, "ALLGATHER_BASE") else "ALLGATHER"
    seen, aborted = [], []
    assert group.supports_completion_hooks
    assert group.supports_abort_hooks
    assert not group.supports_window
    assert not group.supports_reconfigure
    group.register_pre_hook(1, lambda call: seen.append((call.name.name, len(call.input_tensors))))
    group.register_post_hook(2, lambda call: seen.append((call.name.name, call.work.wait())))
    dist.broadcast(torch.ones(2), 0)
    dist.all_gather_single(torch.ones(4), torch.ones(4), async_op=True).wait()
    group.unregister_pre_hook(1)
    group.unregister_post_hook(2)
    dist.barrier()
    assert seen == [
        ("BROADCAST", 1),
        ("BROADCAST", True),
        (gathered, 1),
        (gathered, True),
    ], seen
    group.register_abort_hook(3, lambda: aborted.append(True))
    group.abort()
    assert aborted == [True]
else:
    dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda done: done).wait()
dist.destroy_process_group()
left = [thread.name for thread in threading.enumerate() if thread.name.startswith("meshlib")]
assert not left, left
