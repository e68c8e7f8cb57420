"""A job that calls and sends says whether its connections are inside TLS."""

import gc
import os

import numpy as np

os.chdir("/")  # the files were named from where meshrun was started
import meshlib as dist  # noqa: E402
from transport._net.tls import TlsSocket  # noqa: E402

dist.init_process_group("tcp")
rank, size = dist.get_rank(), dist.get_world_size()
x = np.full(100_000, rank + 1.0)
dist.all_reduce(x)
assert (x == size * (size + 1) / 2).all()
if rank == 0:
    dist.send(x, dst=size - 1)
elif rank == size - 1:
    dist.recv(x, src=0)
used = [o for o in gc.get_objects() if isinstance(o, TlsSocket) and o.fileno() >= 0]
print("inside TLS" if len(used) >= 2 else "plain", flush=True)
dist.destroy_process_group()
