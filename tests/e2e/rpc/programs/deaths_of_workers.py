"""A worker ends in the way that the argument names, while others call it or are called by it."""

import os
import signal
import sys
import time

import meshlib as dist
from meshlib import rpc
from meshlib._job.world import World
from meshlib.rpc._worker import current_worker


class Thing:
    def __init__(self):
        self.value = 1

    def get(self):
        return self.value


held = []


def whoami():
    return os.getpid()


def pass_on(*paths):
    rpc.rpc_sync(1, until_cancelled, paths, timeout=0)


def until_cancelled(begun, cancelled):
    touch(begun)
    while not rpc.cancelled():
        time.sleep(0.005)
    touch(cancelled)


def use(rref):
    return rref.to_here().value


def keep(rref):
    held.append(rref)


def rank_of(path):
    await_file("leaving")
    try:
        return dist.get_rank()
    finally:
        touch(path)


def touch(path):
    with open(path, "w"):
        pass


def await_file(path):
    while not os.path.exists(path):
        time.sleep(0.005)


def callee():
    """Kill rank 2, which is called and owns what others refer to."""
    if me == 0:
        rref = rpc.remote(2, Thing)
        assert rpc.rpc_sync(1, use, (rref,)) == 1
        pid = rpc.rpc_sync(2, whoami)
        call = rpc.rpc_async(2, pass_on, ("begun", "cancelled"), timeout=0)
        await_file("begun")
        os.kill(pid, signal.SIGKILL)
        for use_it in (
            call.wait,
            rref.to_here,
            lambda: rpc.rpc_sync(2, whoami),
            lambda: rpc.rpc_sync(1, use, (rref,)),
        ):
            try:
                use_it()
            except rpc.WorkerLostError as error:
                print(error.worker, error.rank, error)
        assert rpc.rpc_sync(1, whoami) != pid
    rpc.shutdown()
    print("done", me)


def caller():
    """Kill rank 1, which calls and holds what rank 0 owns."""
    if me == 1:
        _mine, granted, given = [rpc.remote(0, Thing) for _ in range(3)]
        given.rpc_sync().get()
        references = current_worker().references
        references.dump(granted, 0)  # the owner is notified, and the reference is never sent
        references._post = lambda *_: None  # it is sent, and the owner is not notified
        rpc.rpc_sync(0, keep, (given,))
        rpc.rpc_async(0, until_cancelled, ("begun", "cancelled"), timeout=0)
        await_file("begun")
        os.kill(os.getpid(), signal.SIGKILL)
    if me == 0:
        await_file("cancelled")
        while len(current_worker().references) > 1:
            time.sleep(0.005)
        assert held[0].to_here().value == 1
        held.clear()
        while len(current_worker().references):
            time.sleep(0.005)
    rpc.shutdown()
    print("done", me)


def leaver():
    """Have rank 1 leave the job while a function of its own runs."""
    if me == 1:
        closed = World.close

        def close(self, **options):
            touch("leaving")
            await_file("ran")
            time.sleep(0.3)
            closed(self, **options)

        World.close = close
        rpc.rpc_sync(0, whoami)
        await_file("called")
        dist.destroy_process_group()
        sys.exit()
    if me == 0:
        call = rpc.rpc_async(1, rank_of, ("ran",), timeout=0)
        touch("called")
        await_file("leaving")
        thing = rpc.RRef(Thing())
        for answer in call.wait, lambda: rpc.rpc_sync(1, use, (thing,), timeout=0):
            try:
                print("value", answer())
            except rpc.WorkerLostError as error:
                print("lost", error.rank)
            except Exception as error:  # noqa: BLE001 (told, whatever it is)
                print("error", repr(error))
    rpc.shutdown()


dist.init_process_group()
me = dist.get_rank()
rpc.init_rpc(f"worker{me}")
{"callee": callee, "caller": caller, "leaver": leaver}[sys.argv[1]]()
