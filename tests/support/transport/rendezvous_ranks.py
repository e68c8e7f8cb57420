"""Ranks, as threads or processes, that meet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from transport._rendezvous import rendezvous
from transport._store import Store

SOON = 30.0
Met = tuple[Store, int, int]


def meet(url: str, rank: int = -1, world_size: int = -1, **others: Any) -> Met:
    """Return what one rank gets."""
    others.setdefault("timeout", SOON)
    return next(rendezvous(url, rank, world_size, **others))


@contextmanager
def meeting(url: str, ranks: Sequence[int], **others: Any) -> Iterator[list[Met]]:
    """Yield what each of several threads got, in the order of ``ranks``."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(meet, url, rank, len(ranks), **others) for rank in ranks]
        try:
            yield [future.result(SOON + 5) for future in futures]
        finally:
            for future in futures:
                if future.exception(SOON + 5) is None:
                    future.result()[0].close()


def check_together(met: Sequence[Met], ranks: Sequence[int]) -> None:
    """Assert that these ranks are in one job."""
    assert sorted(rank for _, rank, _ in met) == sorted(ranks)
    assert {world_size for _, _, world_size in met} == {len(ranks)}
    for store, rank, _ in met:
        store.set(f"here/{rank}", str(rank))
    for store, _, _ in met:
        assert store.multi_get([f"here/{rank}" for rank in ranks]) == [
            str(rank).encode() for rank in ranks
        ]


CODE = """
import sys
from transport._rendezvous import rendezvous
store, rank, world_size = next(rendezvous(*[eval(text) for text in sys.argv[1:]], timeout=20))
store.set(f"here/{rank}", str(rank))
store.wait([f"here/{i}" for i in range(world_size)])
print(rank, world_size, flush=True)
if store.add("done", 1) == world_size:
    store.set("all done", "")
store.wait(["all done"])
if rank == 0:
    while store.add("gone", 0) < world_size - 1:
        pass
else:
    store.add("gone", 1)
store.close()
"""


def run_processes(places: Sequence[tuple[object, ...]], **variables: str) -> list[str]:
    """Return what processes print that meet with these arguments of ``rendezvous``."""
    environment = {**os.environ, **variables}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, *map(repr, place)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]
    try:
        found = [process.communicate(timeout=40) for process in processes]
    finally:
        for process in processes:
            process.kill()
    errors = "".join(error for _, error in found)
    assert not errors, errors
    return sorted(output.strip() for output, _ in found)
