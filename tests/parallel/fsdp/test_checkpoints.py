"""Fully sharded and tensor parallel transformers: cut on one mesh, gone on with on another."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.checkpoint import Checkpointer
from meshlib.checkpoint._files import layout
from meshlib.testing import run_ranks
from parallel import optim
from parallel.state import global_layout, global_state, restore
from tests.support.parallel.fsdp_training import make_transformer, shard, tokens_batch, train

CUT, STEPS = 3, 6


@pytest.fixture(autouse=True)
def _many_chunks(monkeypatch):
    monkeypatch.setattr(layout, "MOST_BYTES", 512)
    monkeypatch.setattr(layout, "LEAST_BYTES", 64)


def run(folder, shape, begin, end):
    """Train steps ``begin`` to ``end`` on a mesh of (replicas, shards, tp), and save."""
    names = "replicate", "shard", "tp"
    mesh = dist.DeviceMesh.from_shape("cpu", shape, mesh_dim_names=names)
    data = mesh["replicate", "shard"]
    model = make_transformer(tp=mesh["tp"] if shape[2] > 1 else None)
    shard(model, data if shape[0] > 1 else mesh["shard"])
    optimizer = optim.AdamW(model.parameters(), lr=0.01)

    def batches(step, rank, world):
        return tokens_batch(begin + step, rank, world)

    with Checkpointer(folder, sync=False) as checkpoints:
        if begin:
            restore(checkpoints.load(global_layout(model, optimizer)), model, optimizer)
        rank = data.process_group.rank()
        losses = train(model, batches, rank, data.size(), end - begin, optimizer=optimizer)
        checkpoints.async_save(global_state(model, optimizer), step=end)
        return data.all_reduce(np.array(losses), op=dist.ReduceOp.AVG)


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    """The losses of one process."""
    return run_ranks(run, 1, tmp_path_factory.mktemp("uncut"), (1, 1, 1), 0, STEPS)[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 2, 2), (2, 2, 2)),
        ((1, 4, 1), (1, 2, 4)),
        ((2, 2, 2), (1, 1, 1)),
        ((2, 1, 2), (1, 8, 1)),
    ],
)
def test_a_run_goes_on_on_another_mesh(tmp_path, before, after, uncut):
    (cut, *_) = run_ranks(run, int(np.prod(before)), tmp_path, before, 0, CUT)
    for losses in run_ranks(run, int(np.prod(after)), tmp_path, after, CUT, STEPS):
        np.testing.assert_allclose([*cut, *losses], uncut, rtol=0, atol=1e-9)
