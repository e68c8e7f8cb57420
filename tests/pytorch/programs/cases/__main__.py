"""What PyTorch programs do over a backend: each case returns tensors, the same ones over Gloo.

Run as ``cases RANK FOLDER``, one process a rank. Writes ``FOLDER/RANK.json``: what went wrong
with each case, or "".
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
import warnings
from datetime import timedelta

import calls  # noqa: F401
import libraries  # noqa: F401
import subgroups  # noqa: F401 (the last cases)
import torch
import torch.distributed as dist
from registry import CASES, RANKS

import meshlib.torch  # noqa: F401

# meshlib adds halves in single precision and rounds once, Gloo after each addition.
LOOSE = {"ddp_with_hooks_that_compress": {"rtol": 5e-3, "atol": 5e-3}}


def run(name):
    return [x.detach().clone() for x in CASES[name]()]


def main(rank, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found, wrong = {}, dict.fromkeys(CASES, "")
    for which in ("meshlib", "gloo"):
        dist.init_process_group(
            which,
            init_method=f"file://{folder}/meet-{which}",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=60),
        )
        for name in CASES:
            if wrong[name]:
                continue
            try:
                torch.manual_seed(rank)
                found[which, name] = run(name)
            except Exception:  # noqa: BLE001 (the case's outcome)
                wrong[name] = f"over {which}: {traceback.format_exc()}"
            reports = [None] * RANKS
            dist.all_gather_object(reports, wrong[name])
            wrong[name] = "\n".join(filter(None, reports))
        dist.destroy_process_group()
    for name in CASES:
        if not wrong[name]:
            ours, theirs = copy.copy(found["meshlib", name]), found["gloo", name]
            try:
                torch.testing.assert_close(ours, theirs, **LOOSE.get(name, {}))
            except AssertionError as error:
                wrong[name] = f"rank {rank}: {error}"
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(wrong, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
