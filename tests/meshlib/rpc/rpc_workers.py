"""Workers that are threads of the test's process."""

import meshlib as dist
from meshlib import rpc
from meshlib.testing import run_ranks


def workers(count, fn, *args, threads=4, timeout=60.0):
    """Have ``fn(*args)`` called by worker 0 of ``count``; the others serve. Returns its result."""

    def rank():
        options = rpc.RpcBackendOptions(num_worker_threads=threads, rpc_timeout=timeout)
        rpc.init_rpc(f"w{dist.get_rank()}", rpc_backend_options=options)
        try:
            result = fn(*args) if dist.get_rank() == 0 else None
        except BaseException:
            rpc.shutdown(graceful=False)
            raise
        rpc.shutdown()
        return result

    return run_ranks(rank, count, timeout=50)[0]
