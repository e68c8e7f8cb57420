"""The program of the ranks of a chaos run: a small training in float64 that notes each commit.

meshrun -n 4 --replace 3 tests/benchmarks/elastic/program.py OUT KIND SHAPE STEPS
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import meshlib as dist
from parallel import optim
from parallel.elastic import ElasticMesh
from tests.support.parallel import elastic_ranks as training

DEADLINE = 3.0


class Notes:
    """One rank's notes: lines of JSON, each there as soon as it is known."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"rank-{rank}.jsonl").open("a", buffering=1)

    def add(self, what: str, *values: object) -> None:
        """Note ``what`` has happened, now."""
        self._file.write(json.dumps([what, time.time(), *values]) + "\n")


def train(out: Path, kind: str, shape: tuple[int, ...], until: int) -> None:
    """Train ``until`` so many steps are committed."""
    rank = int(os.environ["RANK"])
    notes = Notes(out, rank)
    notes.add("begins", os.getpid())
    dist.init_process_group(timeout=60)
    names = ("dp",) if len(shape) == 1 else ("dp_replicate", "dp_shard")
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names, timeout=DEADLINE)
    with ElasticMesh(mesh, names[0], timeout=DEADLINE, join_timeout=60) as elastic:
        own = jax_step(elastic) if kind == "jax" else numpy_step(kind, elastic)
        notes.add("ready")
        for step in elastic.steps(own.state, until, batches=training.make_batches()):
            with step as current:
                own.compute(step)
                step.on_commit(notes.add, "commit", step.number, current.mesh.ravel().tolist())
                time.sleep(0.01)
        if elastic.placed:
            notes.add("ends", elastic.committed, own.values())
        else:
            notes.add("spare", elastic.committed)


class numpy_step:
    """DDP and HSDP."""

    def __init__(self, kind: str, elastic: ElasticMesh) -> None:
        self.model = training.build(kind, elastic.mesh)
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def compute(self, step) -> None:
        """Compute the gradients of the step."""
        training.backward(self.model, step.share.samples, step.share.weight)
        step.on_commit(self.optimizer.step)
        step.on_commit(self.optimizer.zero_grad)

    def values(self) -> list[str]:
        """Return the parameters, as hexadecimal."""
        return [array.tobytes().hex() for array in training.values_of(self.model)]


class jax_step:
    """JAX's DDP, with Adam written out: the same training."""

    def __init__(self, elastic: ElasticMesh) -> None:
        import jax
        import jax.numpy as jnp

        from parallel.jax import DistributedDataParallel

        jax.config.update("jax_enable_x64", True)
        params = [jnp.asarray(p.data) for p in training.make_model().parameters()]
        ddp = DistributedDataParallel(params, elastic.mesh["dp"])
        zeros = [jnp.zeros_like(p) for p in params]
        self.state = {"ddp": ddp, "params": ddp.params, "m": zeros, "v": zeros, "count": 0}

        def loss(params, x, y, scale):
            w1, b1, w2, b2 = params
            output = jnp.tanh(x @ w1.T + b1) @ w2.T + b2
            return jnp.sum(scale * (output - y) ** 2)

        @jax.jit
        def update(params, m, v, count, x, y, scale):
            _, grads = ddp.value_and_grad(loss)(params, x, y, scale)
            m = [0.9 * one + 0.1 * g for one, g in zip(m, grads, strict=True)]
            v = [0.999 * one + 0.001 * g * g for one, g in zip(v, grads, strict=True)]
            fixes = 1 - 0.9**count, 1 - 0.999**count
            params = [
                p - 0.1 * (a / fixes[0]) / (jnp.sqrt(b / fixes[1]) + 1e-8)
                for p, a, b in zip(params, m, v, strict=True)
            ]
            return params, m, v

        self._update = update

    def compute(self, step) -> None:
        """Compute the step; shares of any size are padded, so that nothing is compiled again."""
        import jax

        samples, state = step.share.samples, self.state
        x, y = np.zeros((12, training.FEATURES)), np.zeros((12, 1))
        x[: len(samples)], y[: len(samples)] = training.INPUTS[samples], training.TARGETS[samples]
        scale = np.zeros((12, 1))
        scale[: len(samples)] = step.share.weight / max(len(samples), 1)
        count = state["count"] + 1
        new = self._update(state["params"], state["m"], state["v"], float(count), x, y, scale)
        params, m, v = jax.block_until_ready(new)
        step.on_commit(state.update, params=params, m=m, v=v, count=count)

    def values(self) -> list[str]:
        """Return the parameters, as hexadecimal."""
        return [np.asarray(p).tobytes().hex() for p in self.state["params"]]


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], tuple(map(int, sys.argv[3].split("x"))), int(sys.argv[4]))
