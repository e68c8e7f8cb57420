"""Children that rank 0 forks are refused what they ask of its job, which goes on as before."""

import multiprocessing
import os
import sys
import traceback

import numpy as np

import meshlib as dist

dist.init_process_group("shm", timeout=90)
rank = dist.get_rank()
groups = [dist.new_group(backend=name, group_desc=name) for name in ("auto", "shm", "tcp")]
stores = [group.get_group_store() for group in groups]
for group in groups:
    for _ in range(3):
        dist.all_reduce(np.ones(4), group=group)  # past the first, where the core takes over


def refused(call, *arguments, **options):
    try:
        got = call(*arguments, **options)
    except dist.DistError as error:
        message = str(error)
        assert f"process {parent} " in message and f"process {os.getpid()}" in message, message
        assert "expected" in message, message
        return
    raise AssertionError(f"a call was made: {got}")


def in_child():
    assert dist.get_rank() == 0 and dist.get_world_size() == 2
    refused(pending.wait)
    for group, store in zip(groups, stores, strict=True):
        refused(dist.all_reduce, np.full(4, 100.0), group=group)
        refused(dist.all_reduce, np.ones(100_000), group=group)
        refused(dist.all_reduce, np.ones(4), group=group, async_op=True)
        refused(dist.barrier, group=group)
        refused(dist.send, np.ones(4), 1, group=group)
        refused(lambda: dist.new_group().barrier())
        refused(store.get, "key")
    dist.destroy_process_group()
    assert not dist.is_initialized()


def fork(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 (told by the child's exit code)
            traceback.print_exc()
            os._exit(1)
        if work is in_child:
            os._exit(0)
        sys.exit(0)  # the whole way out, over what runs at exit
    assert os.waitpid(child, 0)[1] == 0


parent = os.getpid()
if rank == 0:
    box = np.zeros(1)
    pending = dist.irecv(box, 1)  # under way, in a thread that no child has
    fork(in_child)
    fork(lambda: None)
    worker = multiprocessing.get_context("fork").Process(target=in_child)
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0, worker.exitcode
for group in groups:
    x = dist.all_reduce(np.ones(4), group=group)
    assert (x == 2).all(), (group, x)
if rank == 0:
    pending.wait()
    assert box[0] == 5
else:
    dist.send(np.full(1, 5.0), 0)
print("whole", flush=True)
dist.destroy_process_group()
