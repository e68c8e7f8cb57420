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

import os
import statistics
import sys
from collections import defaultdict

import numpy as np

import meshlib as dist
from parallel import nn
from parallel.pipeline import Kind, PipelineStage, get_schedule_class, simulate

MICROBATCHES = 8
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

    def forward(self, x, _):
        """Return it."""
        self.save_for_backward(x.shape)
        return float(x[0].mean())

    def backward(self, grad):
        """Return the gradient of all rows."""
        shape = self.saved()
        result = np.zeros(shape, np.float32)
        result[0] = grad / shape[1]
        return result


def schedule_of(name, mesh, width, layers, rows):
    """Return a schedule, a batch and its targets."""
    rank = dist.get_rank()
    rng = np.random.default_rng(rank)
    parts = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, rng=rng), nn.ReLU()]
    stage = PipelineStage(nn.Sequential(*parts), rank, dist.get_world_size(), mesh["pp"])
    schedule = get_schedule_class(name)(stage, MICROBATCHES, Mean())
    x = np.random.default_rng(9).normal(size=(rows * MICROBATCHES, width)).astype(np.float32)
    return schedule, x, np.arange(len(x)) % width


def row(name, size, table, timelines):
    """Return a line of text."""
    by_own, longer = [], []
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
            if (span.action.kind is Kind.FORWARD) is forward
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


def main():
    """Measure, and print on rank 0."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    names = sys.argv[2:] or ["1F1B", "Eager1F1B", "GPipe", "InterleavedZeroBubble"]
    mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("pp",))
    cases = {(name, size): schedule_of(name, mesh, *size) for size in SIZES for name in names}
    timelines = defaultdict(list)
    for turn in range(rounds + 1):
        for (name, size), (schedule, x, y) in cases.items():
            for _ in range(SIZES[size]):
                schedule.stages[0].submodule.zero_grad()
                mesh.barrier()
                schedule.step(x, target=y, return_outputs=False)
                if turn:
                    timelines[name, size].append(schedule.timeline())
    if dist.get_rank() == 0:
        print(f"{rounds} rounds, load {os.getloadavg()[0]:.1f}")
        for key, found in timelines.items():
            print(row(*key, cases[key][0].table, found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
