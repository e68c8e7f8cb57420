"""Bubbles of pipeline schedules, planned and measured, by what a stage costs.

    meshrun --start exec --nproc-per-node 2 tests/benchmarks/bubbles.py [ROUNDS] [NAME ...]

A stage a rank, equal ones: linear layers with ReLU, float32; 8 microbatches; a loss that costs next
to nothing, since only the last stage has one. Nothing sleeps. In each round each schedule makes a
step of each size. Threads of BLAS: one a rank (set OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1
outside).

A row: the median forward and backward of a microbatch, in milliseconds; the bubble of the table,
with the usual costs; the bubble of the table with what each action took in that very step; the
measured one; and how much longer a microbatch took than by the table with these costs: medians, and
in the step with the least of it.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import meshlib as dist
from parallel import nn
from parallel.pipeline import ActionKind, PipelineStage, Timing, get_schedule_class, simulate

MICROBATCHES = 8
Size = tuple[int, int, int]
SIZES = {
    (256, 1, 32): 3,
    (256, 2, 64): 2,
    (512, 2, 64): 1,
    (512, 4, 64): 1,
    (768, 4, 128): 1,
    (1024, 4, 128): 1,
}
"""(width, layers, rows) to how many steps each has in a round."""


class Mean(nn.Module):
    """The mean of the first row."""

    def forward(self, x: Any, _: Any) -> float:
        """Return it."""
        self.save_for_backward(x.shape)
        return float(x[0].mean())

    def backward(self, grad: Any) -> Any:
        """Return the gradient of all rows."""
        shape = self.saved()
        result = np.zeros(shape, np.float32)
        result[0] = grad / shape[1]
        return result


class Case(NamedTuple):
    """A stage's module, its schedule, a batch and its targets."""

    part: nn.Module
    schedule: Any
    x: Any
    y: Any


def case_of(name: str, mesh: dist.DeviceMesh, width: int, layers: int, rows: int) -> Case:
    """Return what makes steps of ``rows`` rows a microbatch."""
    rank = dist.get_rank()
    rng = np.random.default_rng(rank)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, rng=rng), nn.ReLU()]
    part = nn.Sequential(*parts)
    stage = PipelineStage(part, rank, dist.get_world_size(), mesh["pp"])
    schedule = get_schedule_class(name)(stage, MICROBATCHES, Mean())
    x = np.random.default_rng(9).normal(size=(rows * MICROBATCHES, width)).astype(np.float32)
    return Case(part, schedule, x, np.arange(len(x)) % width)


def row(name: str, size: Size, table: Any, timelines: Sequence[Timing]) -> str:
    """Return a line of text."""
    by_own: list[float] = []
    longer: list[float] = []
    for timeline in timelines:
        costs = {span.action: span.end - span.begin for span in timeline.spans}
        planned = simulate(table, costs.__getitem__)
        by_own.append(planned.bubble)
        longer.append(1e3 * (timeline.makespan - planned.makespan) / MICROBATCHES)
    forward, backward = (
        1e3
        * statistics.median(
            span.end - span.begin
            for timeline in timelines
            for span in timeline.spans
            if (span.action.kind is ActionKind.FORWARD) is forward
        )
        for forward in (True, False)
    )
    least = longer.index(min(longer))
    bubbles = [timeline.bubble for timeline in timelines]
    return (
        f"{name:22} {'x'.join(map(str, size)):12} F {forward:6.2f} rest {backward:6.2f}  table"
        f" {simulate(table).bubble:5.1%} by costs {statistics.median(by_own):5.1%} measured"
        f" {statistics.median(bubbles):5.1%} longer {statistics.median(longer):6.3f} ms;  least"
        f" {by_own[least]:5.1%} {bubbles[least]:5.1%} {longer[least]:6.3f} ms"
    )


def main() -> None:
    """Measure, and print on rank 0."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    names = sys.argv[2:] or ["1F1B", "Eager1F1B", "GPipe", "InterleavedZeroBubble"]
    mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("pp",))
    cases = {(name, size): case_of(name, mesh, *size) for size in SIZES for name in names}
    timelines: dict[tuple[str, Size], list[Timing]] = defaultdict(list)
    for turn in range(rounds + 1):
        for (name, size), (part, schedule, x, y) in cases.items():
            for _ in range(SIZES[size]):
                part.zero_grad()
                mesh.barrier()
                schedule.step(x, target=y, return_outputs=False)
                if turn:
                    timelines[name, size].append(schedule.timeline())
    if dist.get_rank() == 0:
        print(f"{rounds} rounds, load {os.getloadavg()[0]:.1f}")
        for (name, size), found in timelines.items():
            print(row(name, size, cases[name, size].schedule.table, found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
