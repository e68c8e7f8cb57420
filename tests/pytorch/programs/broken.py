"""A PyTorch program in which much goes wrong, each time in a group of its own; then a rank dies.

Run as ``broken.py RANK FOLDER``, two processes. Writes ``FOLDER/RANK.json``: what was raised, by
case.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import meshlib.torch  # noqa: F401

RANK, FOLDER = int(sys.argv[1]), sys.argv[2]


def mismatch(group):
    dist.all_reduce(torch.ones(2 + RANK), group=group)


def mismatch_in_a_work(group):
    dist.all_reduce(torch.ones(2 + RANK), group=group, async_op=True).wait()


def mismatch_in_a_future(group):
    dist.all_reduce(torch.ones(2 + RANK), group=group, async_op=True).get_future().wait()


def mismatch_in_ddp(group):
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    if RANK == 0:
        model(torch.ones(2, 4)).sum().backward()
    else:
        dist.all_reduce(torch.ones(3), group=group)


def late(group):
    time.sleep(3 * RANK)
    dist.all_reduce(torch.ones(2), group=group)


def another_device(group):
    dist.all_reduce(torch.ones(2, device="meta"), group=group)


def sparse(group):
    dist.all_reduce(torch.ones(2).to_sparse(), group=group)


def options(group):
    dist.new_group(pg_options=object())


def some_first(group):
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/gloo", rank=RANK, world_size=2)
    try:
        dist.new_group([RANK], backend="meshlib", use_local_synchronization=True)
    finally:
        dist.destroy_process_group()
        begin("again")


def killed_in_ddp(group):
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def after_that(group):
    dist.all_reduce(torch.ones(2))


CASES = (
    mismatch,
    mismatch_in_a_work,
    mismatch_in_a_future,
    mismatch_in_ddp,
    late,
    another_device,
    sparse,
    options,
    some_first,
    killed_in_ddp,
    after_that,
)


def begin(name):
    dist.init_process_group(
        "meshlib",
        init_method=f"file://{FOLDER}/{name}",
        rank=RANK,
        world_size=2,
        timeout=timedelta(seconds=60),
    )


begin("meet")
raised = {}
for case in CASES:
    limit = timedelta(seconds=1 if case is late else 60)
    group = dist.new_group(timeout=limit) if case is not after_that else None
    try:
        case(group)
    except Exception as error:  # noqa: BLE001 (what is asked for)
        raised[case.__name__] = f"{type(error).__name__}: {error}"
    else:
        raised[case.__name__] = "nothing was raised"
    with open(f"{FOLDER}/{RANK}.json", "w") as file:
        json.dump(raised, file)
