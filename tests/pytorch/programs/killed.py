"""A rank that is killed in the middle of a job, and survivors that may have a handler of SIGTERM.

Run by a launcher as ``killed.py MODE``; ``handler``: SIGTERM makes a collective, as Lightning does.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def handler(*_: object) -> None:
    try:
        dist.barrier()
    except RuntimeError as error:
        print(f"handler of rank {dist.get_rank()}: {type(error).__name__}", flush=True)
    os._exit(1)


# torchrun sends SIGTERM a tenth of a second after the kill: too early for a survivor's traceback.
signal.signal(signal.SIGTERM, handler if sys.argv[1] == "handler" else signal.SIG_IGN)
dist.init_process_group("meshlib")
dist.all_reduce(torch.ones(2))
if dist.get_rank() == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(2))
finally:
    if sys.argv[1] == "handler":
        time.sleep(60)  # until torchrun's SIGTERM
