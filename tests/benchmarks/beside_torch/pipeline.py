"""A step of a pipeline, with meshlib and with torch's pipelining on Gloo, in one run.

    meshrun --start exec --nproc-per-node 2 tests/benchmarks/beside_torch/pipeline.py \\
        [rounds] [layers] [width] [rows] [microbatches]

Linear layers of width x width with ReLU between them, float32, as many on each rank; a batch of
rows for each microbatch, cross-entropy. By default 4 layers a rank of 512 x 512, 64 rows, 8
microbatches. A round has a step of each: 1F1B of both, and meshlib's other schedules. Where torch
is not installed, meshlib's are timed alone. Threads of BLAS: one a rank (set OMP_NUM_THREADS=1 and
OPENBLAS_NUM_THREADS=1 outside).

It prints the medians of the slowest rank's times, by the clock and of its processor; for meshlib
the bubble that was measured beside that of the table, with the usual costs and with what each
action took (medians of all steps, and of the quickest one: the least disturbed); and during how
much of the messages' time on the way their target computed.
"""

import datetime
import os
import socket
import statistics
import sys
from collections import defaultdict
from time import perf_counter, process_time

import numpy as np

import meshlib as dist
from parallel import nn
from parallel.pipeline import PipelineSchedule, PipelineStage, get_schedule_class, simulate

DEFAULTS = (20, 4, 512, 64, 8)
ROUNDS, LAYERS, WIDTH, ROWS, MICROBATCHES = (
    int(given) if given else default
    for given, default in zip([*sys.argv[1:], *[None] * 5][:5], DEFAULTS, strict=True)
)


def batch():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS * MICROBATCHES, WIDTH)).astype(np.float32)
    return x, rng.integers(0, WIDTH, len(x))


def layers_of(stage, stages, ranks):
    """Return how many layers a stage has: all ranks have as many."""
    each = LAYERS * ranks
    return each * (stage + 1) // stages - each * stage // stages


def meshlib_schedules(mesh):
    """Return meshlib's schedules by name."""
    pp, rank, size = mesh["pp"], mesh.get_local_rank("pp"), mesh.size()

    def make(name, stages):
        def module(index):
            rng = np.random.default_rng(index)
            layers = []
            for _ in range(layers_of(index, size * len(stages), size)):
                layers += [nn.Linear(WIDTH, WIDTH, rng=rng), nn.ReLU()]
            if index == size * len(stages) - 1:
                layers.pop()
            return nn.Sequential(*layers)

        total = size * len(stages)
        parts = [PipelineStage(module(index), index, total, pp) for index in stages]
        return get_schedule_class(name)(parts, MICROBATCHES, nn.CrossEntropyLoss())

    return {
        "meshlib 1F1B": make("1F1B", [rank]),
        "meshlib eager 1F1B": make("Eager1F1B", [rank]),
        "meshlib GPipe": make("GPipe", [rank]),
        "meshlib interleaved 1F1B": make("Interleaved1F1B", [rank, rank + size]),
        "meshlib ZB-H1": make("InterleavedZeroBubble", [rank]),
        "meshlib ZB-V": make("ZBVZeroBubble", [rank, 2 * size - 1 - rank]),
    }


def torch_step(x, y):
    """Return a step of torch's 1F1B of the same layers; None if there is no torch."""
    try:
        import torch
        from torch.distributed.pipelining import PipelineStage as TorchStage
        from torch.distributed.pipelining import Schedule1F1B
    except ImportError:
        return None
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    ports = [None]
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports = [free.getsockname()[1]]
    dist.broadcast_object_list(ports)
    os.environ.pop("MASTER_PORT", None)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{ports[0]}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    layers = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    if rank == size - 1:
        layers.pop()
    module = torch.nn.Sequential(*layers)
    stage = TorchStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, torch.nn.functional.cross_entropy)
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)

    def step():
        module.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(inputs, return_outputs=False)
        else:
            schedule.step(target=targets, losses=losses, return_outputs=False)

    return step


def step_of(schedule, x, y):
    def step():
        for stage in schedule.stages:
            stage.submodule.zero_grad()
        schedule.step(x, target=y, return_outputs=False)

    return step


def makespan(timing):
    return timing.makespan


def described(table, timelines):
    """Say what steps had for a bubble, and what their costs would have had without messages."""
    measured = statistics.median(t.bubble for t in timelines)
    costs = simulate(table, median_costs(timelines).__getitem__).bubble
    return f"{measured:5.1%} (by its costs {costs:5.1%})"


def median_costs(timelines):
    """Return the median time of each action over the steps."""
    times = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            times[span.action].append(span.end - span.begin)
    return {action: statistics.median(values) for action, values in times.items()}


def main():
    mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("pp",))
    x, y = batch()
    schedules: dict[str, PipelineSchedule] = meshlib_schedules(mesh)
    steps = {name: step_of(schedule, x, y) for name, schedule in schedules.items()}
    of_torch = torch_step(x, y)
    if of_torch is not None:
        steps["torch 1F1B"] = of_torch
    times, timelines = defaultdict(list), defaultdict(list)
    for i in range(ROUNDS + 3):
        # Each is the first of a round as often as the others.
        names = list(steps)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            mesh.barrier()
            start, worked = perf_counter(), process_time()
            steps[name]()
            took = np.array([perf_counter() - start, process_time() - worked])
            mesh.all_reduce(took, dist.ReduceOp.MAX)
            if i >= 3:
                times[name].append(took.tolist())
                if name in schedules:
                    timelines[name].append(schedules[name].timeline())
    if dist.get_rank() == 0:
        report(schedules, times, timelines)
    dist.destroy_process_group()


def report(schedules, times, timelines):
    load = os.getloadavg()[0]
    print(
        f"{dist.get_world_size()} ranks, {LAYERS} layers of {WIDTH} x {WIDTH} each, {MICROBATCHES} "
        f"microbatches of {ROWS} rows, {ROUNDS} rounds, load {load:.1f}"
    )
    medians = {
        name: [1e3 * statistics.median(column) for column in zip(*taken, strict=True)]
        for name, taken in times.items()
    }
    for name, taken in times.items():
        least = 1e3 * min(wall for wall, _ in taken)
        wall, worked = medians[name]
        line = f"{name:26} {wall:8.2f} ms, least {least:8.2f}, processor {worked:8.2f}"
        if name in schedules:
            table, quickest = schedules[name].table, min(timelines[name], key=makespan)
            line += (
                f"; bubble of the table {simulate(table).bubble:5.1%}; "
                f"median step {described(table, timelines[name])}; "
                f"quickest step {described(table, [quickest])}"
            )
        print(line)
    if "torch 1F1B" in times:
        mine, theirs = "meshlib 1F1B", "torch 1F1B"
        wall, worked = (a / b for a, b in zip(medians[mine], medians[theirs], strict=True))
        least = min(times[mine])[0] / min(times[theirs])[0]
        print(f"{mine} / {theirs}: {wall:.2f}, least {least:.2f}, processor {worked:.2f}")


if __name__ == "__main__":
    main()
