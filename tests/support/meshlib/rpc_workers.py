"""Workers that are threads of the test's process."""

import threading
import time

import meshlib as dist
from meshlib import rpc
from meshlib._job.current import current_world
from meshlib.rpc._worker import current_worker
from meshlib.testing import run_ranks


def until(condition):
    """Wait until ``condition()`` holds."""
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Agents(dict):
    """Those of the workers, by rank. A worker serves calls before its own thread has noted its
    agent: who asks for that waits.
    """

    def __missing__(self, rank):
        until(lambda: rank in self)
        return self[rank]


agents = Agents()


def start_thread(fn):
    """Call ``fn()`` in another thread of the calling worker."""
    world = current_world()

    def body():
        world.adopt_thread()
        fn()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def expire(call):
    """Have the deadline of ``call`` pass now."""
    call.due = 0.0
    current_worker().deadlines.watch(call.due)


def workers(count, fn, *args, threads=4, timeout=120.0):
    """Have ``fn(*args)`` called by worker 0 of ``count``; the others serve. Returns its result."""
    agents.clear()

    def rank():
        options = rpc.RpcBackendOptions(num_worker_threads=threads, rpc_timeout=timeout)
        rpc.init_rpc(f"w{dist.get_rank()}", rpc_backend_options=options)
        agents[dist.get_rank()] = current_worker()
        try:
            result = fn(*args) if dist.get_rank() == 0 else None
        except BaseException:
            rpc.shutdown(graceful=False)
            raise
        rpc.shutdown()
        return result

    return run_ranks(rank, count, timeout=100)[0]
