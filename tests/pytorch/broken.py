"""A PyTorch program in which something goes wrong: ``broken.py RANK FOLDER CASE``.

Prints what the rank that is left sees.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import meshlib.torch  # noqa: F401

RANK, FOLDER, CASE = int(sys.argv[1]), sys.argv[2], sys.argv[3]


def mismatch():
    dist.all_reduce(torch.ones(2 + RANK))


def mismatch_in_a_work():
    work = dist.all_reduce(torch.ones(2 + RANK), async_op=True)
    work.wait()


def mismatch_in_a_future():
    dist.all_reduce(torch.ones(2 + RANK), async_op=True).get_future().wait()


def mismatch_in_ddp():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    if RANK == 0:
        model(torch.ones(2, 4)).sum().backward()
    else:
        dist.all_reduce(torch.ones(3))
        dist.barrier()


def killed():
    dist.barrier()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2))


def killed_in_ddp():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()


def late():
    if RANK == 0:
        dist.all_reduce(torch.ones(2))
    else:
        time.sleep(4)
        dist.all_reduce(torch.ones(2))


def another_device():
    dist.all_reduce(torch.ones(2, device="meta"))


def sparse():
    dist.all_reduce(torch.ones(2).to_sparse())


def options():
    dist.new_group(backend="meshlib", pg_options=object())


dist.init_process_group(
    "meshlib",
    init_method=f"file://{FOLDER}/meet",
    rank=RANK,
    world_size=2,
    timeout=timedelta(seconds=2 if CASE == "late" else 30),
)
try:
    globals()[CASE]()
except Exception as error:  # noqa: BLE001 (what is asked for)
    print(f"{type(error).__module__}.{type(error).__name__}: {error}")
else:
    print("nothing went wrong")
    traceback.print_stack()
finally:
    sys.stdout.flush()
    os._exit(0)
