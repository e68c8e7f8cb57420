"""One small training job, for the tests that compare a pipeline with one process."""

import numpy as np

import meshlib as dist
from parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    fully_shard,
    nn,
    optim,
    parallelize,
)
from parallel.pipeline import PipelineStage

BATCH, LAYERS = 16, 8


def make_layers(seed=0, dtype="f8"):
    """Return eight layers, (B, 6) -> (B, 4): so many stages there can be."""
    rng = np.random.default_rng(seed)
    options = {"rng": rng, "dtype": dtype}
    return [
        nn.Linear(6, 12, **options),
        nn.Sequential(nn.GELU(), nn.Linear(12, 10, **options)),
        nn.LayerNorm(10, dtype=dtype),
        nn.Sequential(nn.Tanh(), nn.Linear(10, 12, **options)),
        nn.Sequential(nn.Linear(12, 12, **options), nn.ReLU()),
        nn.Linear(12, 8, **options),
        nn.Sequential(nn.Tanh(), nn.LayerNorm(8, dtype=dtype)),
        nn.Linear(8, 4, **options),
    ]


def part(layers, stage, stages):
    """Return the layers of one stage, with the paths that they have in the whole model."""
    own = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
    return own, nn.Sequential(*(layers[i] for i in own))


def batch(step, dtype="f8"):
    rng = np.random.default_rng(1000 + step)
    return rng.normal(size=(BATCH, 6)).astype(dtype), rng.integers(0, 4, BATCH)


def train_whole(steps=20):
    """Train on one process; return losses and parameters, by layer and path."""
    model = nn.Sequential(*make_layers())
    optimizer, loss = optim.AdamW(model.parameters(), lr=0.01), nn.CrossEntropyLoss()
    losses = []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        losses.append(loss(model(x), y))
        model.backward(loss.backward())
        optimizer.step()
    return losses, {path: p.data for path, p in model.named_parameters()}


def train_pipeline(mesh, make, placed, microbatches, steps=20, wrap=None):
    """Train as one rank of ``mesh["pp"]``; return its losses and its parameters.

    ``make(stages, microbatches, loss)`` is the schedule, ``placed[rank]`` are a rank's stages,
    ``wrap(part, mesh)`` is what is done for other dims. The other dims' ranks share the batch.
    """
    pp = mesh["pp"]
    total = sum(map(len, placed))
    layers = make_layers()
    stages, modules = [], []
    for index in placed[pp.get_local_rank()]:
        own, module = part(layers, index, total)
        wrapped = module if wrap is None else wrap(module, mesh)
        stages.append(PipelineStage(wrapped, index, total, pp))
        modules.append((own, module))
    schedule = make(stages, microbatches, nn.CrossEntropyLoss())
    optimizers = [optim.AdamW(s.submodule.parameters(), lr=0.01) for s in stages]
    replicas, replica = 1, 0
    if "dp" in mesh.mesh_dim_names:
        replicas, replica = mesh["dp"].size(), mesh.get_local_rank("dp")
    losses = []
    for step in range(steps):
        x, y = (one[replica::replicas] for one in batch(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        of_step = []
        schedule.step(x, target=y, losses=of_step, return_outputs=False)
        losses += [np.mean(of_step)] if of_step else []
        for optimizer in optimizers:
            optimizer.step()
    found = {}
    for own, module in modules:
        for place, layer in zip(own, module, strict=True):
            for path, parameter in layer.named_parameters():
                value = parameter.value
                whole = value.full_array() if hasattr(value, "full_array") else value
                found[f"{place}.{path}"] = whole
    return losses, found


def ddp(module, mesh):
    trained = any(p.requires_grad for p in module.parameters())
    return DistributedDataParallel(module, mesh["dp"]) if trained else module


def fsdp(module, mesh):
    for layer in module:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh["dp"])
    return fully_shard(module, mesh["dp"])


def tensor_parallel(module, mesh):
    """Split a stage of four layers, the first or the second of a model, over the dim "tp"."""
    first = {"0": ColwiseParallel(), "1.1": RowwiseParallel()}
    second = {"0.0": ColwiseParallel(), "1": RowwiseParallel()}
    return parallelize(module, mesh["tp"], first if isinstance(module[0], nn.Linear) else second)


def make_mesh(pp, dp=1, tp=1):
    """Return a mesh of the dims that have more than one rank."""
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    names = tuple(name for name, size in sizes.items() if size > 1)
    return dist.init_device_mesh("cpu", [sizes[name] for name in names], mesh_dim_names=names)


def assert_equal(results, whole, tolerance=1e-9):
    """Compare what the ranks of a job have with one process."""
    losses, parameters = whole
    seen = set()
    for _, found in results:
        for path, value in found.items():
            np.testing.assert_allclose(
                value, parameters[path], rtol=0, atol=tolerance, err_msg=path
            )
            seen.add(path)
    assert seen == set(parameters)
    of_last = [own for own, _ in results if own]
    np.testing.assert_allclose(np.mean(of_last, axis=0), losses, rtol=0, atol=tolerance)
