"""One rank of a measurement, in a process of its own or as a thread."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from meshlib.job.init import destroy_process_group, init_process_group
from meshlib.records import build, values_of
from meshlib.tune.measure import Bench
from transport.choosing.choice import Thresholds
from transport.choosing.cost import Cost


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured among one number of ranks."""

    cost: Cost | None
    thresholds: Thresholds

    def encode(self) -> str:
        """Return this as JSON."""
        return json.dumps(self, default=values_of)

    @classmethod
    def decode(cls, text: str) -> Found:
        """Return what ``encode`` wrote."""
        return build(cls, json.loads(text))


def measure(transport: str) -> Found:
    """Measure among all ranks of the job, of which this is one."""
    bench = Bench(transport)
    return Found(bench.cost(), bench.thresholds())


def run(rank: int, transport: str, path: str) -> None:
    """Be a rank that ``meshlib.spawn`` started; rank 0 writes what was found to ``path``."""
    init_process_group("tcp")
    found = measure(transport)
    if rank == 0:
        Path(path).write_text(found.encode(), encoding="utf-8")
    destroy_process_group()
