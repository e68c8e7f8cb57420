"""The cost of sharding in a training step, with meshlib and with torch's FSDP2 on Gloo, in one run.

Of modules of NumPy arrays, and, where JAX is installed, of a jitted step.

    meshrun --nproc-per-node 2 tests/benchmarks/beside_torch/fsdp.py \
        [rounds] [layers] [width] [rows]

Linear layers of width x width without biases, float32: by default 16 of 1024 x 1024, 67 MB. Where
torch is installed, the same layers in torch are timed in turn. A round has a step of each: forward,
backward and the sum of the ranks' times. ``adds`` is the difference of the medians of the sharded
step and of one without communication; the ratio is meshlib's to torch's. Threads of BLAS: one a
rank (set OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1).
"""

import datetime
import os
import socket
import statistics
import sys
from time import perf_counter

import numpy as np

import meshlib as dist
from parallel import nn
from parallel.fsdp import fully_shard

ROUNDS, LAYERS, WIDTH, ROWS = (
    int(given) if given else default
    for given, default in zip(
        [*sys.argv[1:], None, None, None, None][:4], (40, 16, 1024, 64), strict=True
    )
)


def meshlib_steps(mesh, world):
    """Return steps of the same model: alone, fully sharded, and with two replicas of shards."""

    def make():
        rng = np.random.default_rng(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, False, rng=rng) for _ in range(LAYERS)))

    x = np.ones((ROWS, WIDTH), np.float32)

    def step_of(model):
        def step():
            model.zero_grad()
            y = model(x)
            model.backward(y)

        return step

    def sharded(over, **options):
        model = make()
        for layer in model:
            fully_shard(layer, over, **options)
        return fully_shard(model, over, **options)

    steps = {
        "meshlib alone": step_of(make()),
        "meshlib fully_shard": step_of(sharded(mesh["dp"])),
        "meshlib fully_shard, kept": step_of(sharded(mesh["dp"], reshard_after_forward=False)),
    }
    if world % 2 == 0:
        two = mesh["dp"].unflatten(0, (2, world // 2), ("dp_replicate", "dp_shard"))
        steps["meshlib hsdp"] = step_of(sharded(two))
    return steps


def jax_steps(mesh, world):
    """Return steps of the same model inside ``jax.jit``; nothing if there is no JAX."""
    try:
        import jax
    except ImportError:
        return {}
    from parallel.jax import fsdp

    rng = np.random.default_rng(0)
    weights = rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
    x = np.ones((ROWS, WIDTH), np.float32)

    def dense(w, x):
        return x @ w

    def step_of(params, layer=lambda fn: fn):
        def loss(params):
            y = x
            if isinstance(params, list):
                for w in params:
                    y = layer(dense)(w, y)
            else:
                y, _ = jax.lax.scan(lambda y, w: (layer(dense)(w, y), None), y, params)
            return (y * y).sum() / 2

        program = jax.jit(jax.grad(loss))
        return lambda: jax.block_until_ready(program(params))

    def kept(fn):
        return lambda part, x: fn(fsdp.gather(part, after=x), x)

    parts = fsdp.shard(list(weights), mesh["dp"])
    stack = fsdp.shard(weights, mesh["dp"], stacked=[""])
    steps = {
        "jax alone": step_of(list(map(jax.numpy.asarray, weights))),
        "jax fully_shard": step_of(parts, fsdp.layer),
        "jax fully_shard, kept": step_of(parts, kept),
        "jax scan alone": step_of(jax.numpy.asarray(weights)),
        "jax scan fully_shard": step_of(stack, fsdp.layer),
    }
    if world % 2 == 0:
        two = mesh["dp"].unflatten(0, (2, world // 2), ("dp_replicate", "dp_shard"))
        steps["jax hsdp"] = step_of(fsdp.shard(list(weights), two), fsdp.layer)
    return steps


def torch_steps(mesh, world):
    """Return the same in torch, over Gloo; nothing if there is no torch."""
    try:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard as torch_fully_shard
    except ImportError:
        return {}
    torch.set_num_threads(1)
    ports = [None]
    if dist.get_rank() == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports = [free.getsockname()[1]]
    dist.broadcast_object_list(ports)
    os.environ.pop("MASTER_PORT", None)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{ports[0]}",
        rank=dist.get_rank(),
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )

    def make():
        torch.manual_seed(0)
        layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        return torch.nn.Sequential(*layers)

    x = torch.ones(ROWS, WIDTH)

    def step_of(model):
        def step():
            model.zero_grad()
            y = model(x)
            y.backward(y.detach())

        return step

    def sharded(over, **options):
        model = make()
        for layer in model:
            torch_fully_shard(layer, mesh=over, **options)
        torch_fully_shard(model, mesh=over, **options)
        return model

    flat = init_device_mesh("cpu", (world,))
    steps = {
        "torch alone": step_of(make()),
        "torch fully_shard": step_of(sharded(flat)),
        "torch fully_shard, kept": step_of(sharded(flat, reshard_after_forward=False)),
    }
    if world % 2 == 0:
        names = ("dp_replicate", "dp_shard")
        two = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
        steps["torch hsdp"] = step_of(sharded(two))
    return steps


def main():
    mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("dp",))
    world = dist.get_world_size()
    steps = meshlib_steps(mesh, world) | jax_steps(mesh, world) | torch_steps(mesh, world)
    times = {name: [] for name in steps}
    for i in range(ROUNDS + 3):
        # Each is the first of a round as often as the others.
        names = list(steps)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            mesh.barrier()
            start = perf_counter()
            steps[name]()
            took = np.array([perf_counter() - start])
            mesh.all_reduce(took, dist.ReduceOp.MAX)
            if i >= 3:
                times[name].append(took[0])
    if dist.get_rank() == 0:
        medians = {name: statistics.median(own) for name, own in times.items()}
        size = LAYERS * WIDTH * WIDTH * 4 / 1e6
        print(
            f"{world} ranks, {LAYERS} x {WIDTH} x {WIDTH} float32, {size:.0f} MB, {ROUNDS} rounds"
        )
        for kind in ("fully_shard", "fully_shard, kept", "hsdp"):
            added = {}
            for library in ("meshlib", "jax", "jax scan", "torch"):
                if f"{library} {kind}" not in medians:
                    continue
                whole, alone = medians[f"{library} {kind}"], medians[f"{library} alone"]
                added[library] = whole - alone
                print(
                    f"{library:8} {kind:18} {1e3 * whole:8.1f} ms  alone {1e3 * alone:8.1f} ms"
                    f"  adds {1e3 * (whole - alone):8.1f} ms"
                )
            for library in added if "torch" in added else ():
                print(f"{library:8} {kind:18} {added[library] / added['torch']:8.2f} of torch's")
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    dist.destroy_process_group()


main()
