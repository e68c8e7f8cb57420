"""Tokens a second of the example GPT, 10.7 million parameters, on 1 and 2 ranks and by shard_map.

    python -m tests.benchmarks.data_parallel.gpt [ROUNDS] [SEQUENCES]

In each round four jobs train for a few steps, one after the other, on the same batches: 32
SEQUENCES of 64 tokens by default, float32. The fewer there are, the more of a step is
communication (43 MB of gradients). Each rank has one core. ``alone`` is the program of a single
process, jitted as a whole. ``example`` runs examples/gpt on one rank and on ``dp_replicate=2``.
``shard_map`` averages the gradients by ``psum`` over JAX's Gloo on two processes. A figure is the
median of the rounds' medians; the losses of all jobs must agree.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GPT = Path(__file__).parents[3] / "examples" / "gpt"
JOBS = {"alone": 1, "example": 1, "example 2": 2, "shard_map": 2}
STEPS, WARMUP = 8, 2
CONFIG = """
[model]
layers = 6
width = 384
heads = 6
kv_heads = 6
hidden = 1536
[data]
batch_size = {sequences}
microbatches = 1
[parallel]
sequence = false
"""


def example_step(config: Any, mesh: Any) -> Callable[[int], float]:
    """Return the example's own step."""
    from gpt_trainer import Trainer

    return Trainer(config, mesh).step


def plain_step(config: Any, mesh: Any, processes: int) -> Callable[[int], float]:
    """Return a step of whole arrays in one program; ``shard_map`` where there are two processes."""
    import jax
    import numpy as np
    from gpt_model import draw_part, names_of
    from gpt_trainer import Trainer
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from parallel.jax import vocab_parallel_cross_entropy

    whole = Trainer(config, mesh)  # of one rank: batches, the optimizer, and the functions
    params: Any = {"blocks": {}}
    for name in names_of(config.model.layers, 1)[0]:
        kind, _, number = name.partition(".")
        rng = np.random.default_rng([config.run.seed, len(kind), int(number or 0)])
        part = draw_part(config, kind, int(number or 0), rng)
        if number:
            params["blocks"][number] = part[kind]
        else:
            params |= part

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        logits = whole.compute(params, inputs)
        return vocab_parallel_cross_entropy(logits, targets, whole.dims.tp).mean()

    def step(params: Any, state: Any, inputs: Any, targets: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, inputs, targets)
        if processes > 1:
            value, grads = jax.lax.pmean((value, grads), "dp")
        return value, *whole._updated(params, state, grads)

    if processes == 1:
        program = jax.jit(step)
        place: Any = jax.numpy.asarray
        tree = jax.tree.map(place, params)
    else:
        devices = Mesh(np.array(jax.devices()), ("dp",))
        rows, all_of_it = PartitionSpec("dp"), PartitionSpec()
        program = jax.jit(
            jax.shard_map(
                step,
                mesh=devices,
                in_specs=(all_of_it, all_of_it, rows, rows),
                out_specs=(all_of_it, all_of_it, all_of_it),
                check_vma=False,
            )
        )
        by_rows, everywhere = NamedSharding(devices, rows), NamedSharding(devices, all_of_it)

        def place(batch: Any) -> Any:
            share = len(batch) // processes
            begin = jax.process_index() * share
            return jax.make_array_from_process_local_data(
                by_rows, batch[begin : begin + share], batch.shape
            )

        tree = jax.device_put(params, everywhere)
    state = jax.jit(whole.optimizer.init)(tree)

    def one(number: int) -> float:
        nonlocal tree, state
        value, tree, state = program(tree, state, *map(place, whole.batch(number)))
        return float(value)

    return one


def train(job: str, rank: int, port: int, config_file: str) -> None:
    """Run one rank of a job; rank 0 prints seconds and losses as JSON."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    sys.path.insert(0, str(GPT))
    import jax
    from gpt_config import Config

    import meshlib as dist

    size, plain = JOBS[job], job in ("alone", "shard_map")
    if plain and size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
    if plain:
        dist.init_process_group("fake", rank=0, world_size=1)
    else:
        dist.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    mesh = dist.init_device_mesh("cpu", (1 if plain else size,), mesh_dim_names=("dp_replicate",))
    config = Config(Path(config_file))
    step = plain_step(config, mesh, size) if plain else example_step(config, mesh)
    losses = [step(i) for i in range(WARMUP)]
    seconds: list[float] = []
    for number in range(WARMUP, STEPS):
        began = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps({"seconds": seconds, "losses": losses}))
    if plain and size > 1:
        jax.distributed.shutdown()
    dist.destroy_process_group()


def run(job: str, config_file: str) -> dict[str, list[float]]:
    """Run a job; return what its rank 0 printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = os.environ | {
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "NPROC": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, job, str(rank), str(port), config_file],
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(JOBS[job])
    ]
    try:
        answers = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{job}: a rank failed; see above")
    return json.loads(answers[0].splitlines()[-1])


def main(rounds: int = 3, sequences: int = 32) -> None:
    """Run all jobs in turn; print tokens a second and their ratios."""
    medians: dict[str, list[float]] = {job: [] for job in JOBS}
    losses: dict[str, list[float]] = {}
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(CONFIG.format(sequences=sequences))
        config.flush()
        for _ in range(rounds):
            for job in JOBS:
                answer = run(job, config.name)
                medians[job].append(statistics.median(answer["seconds"]))
                losses[job] = answer["losses"]
    tokens = sequences * 64
    speeds = {job: tokens / statistics.median(times) for job, times in medians.items()}
    for job, speed in speeds.items():
        print(
            f"{job:10} {JOBS[job]} ranks  {speed:8,.0f} tokens a second  loss {losses[job][-1]:.5f}"
        )
    two = speeds["example 2"]
    for job in ("alone", "example", "shard_map"):
        print(f"example on 2 ranks: {two / speeds[job]:.2f} of {job}")
    worst = max(abs(values[-1] - losses["alone"][-1]) for values in losses.values())
    if worst > 1e-3:
        raise SystemExit(f"the losses differ by {worst}")


if __name__ == "__main__":
    if len(sys.argv) > 3:
        train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main(*map(int, sys.argv[1:]))
