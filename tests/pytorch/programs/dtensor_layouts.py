"""What ``test_sharded.py`` runs: who has which part of an array, by meshlib and by DTensor.

DTensor runs as each rank in turn, over PyTorch's backend that sends nothing. Shapes, meshes and
placements are drawn by hypothesis, uneven, empty and zero-size parts among them.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshlib as dist
from meshlib import sharding

RANKS = 12


@st.composite
def cases(draw):
    """Draw a mesh, a shape, and for each mesh dim the array dim that it splits, or None."""
    sizes = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: np.prod(s) <= RANKS)
    )
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    split = draw(st.tuples(*(st.sampled_from([None, *range(len(shape))]) for _ in sizes)))
    return tuple(sizes), tuple(shape), split


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_parts(case):
    """Each rank has the same part."""
    sizes, shape, split = case
    mesh = dist.DeviceMesh.from_shape("cpu", sizes)
    mine = [sharding.Replicate() if d is None else sharding.Shard(d) for d in split]
    ours = sharding.Sharding(mesh, mine)
    whole = torch.arange(float(np.prod(shape))).reshape(shape)
    placements = [Replicate() if d is None else Shard(d) for d in split]
    assert ours.placements == mine
    for rank in range(mesh.size()):
        torch.distributed.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=mesh.size()
        )
        try:
            theirs = TorchMesh("cpu", torch.arange(mesh.size()).reshape(sizes))
            local = distribute_tensor(whole, theirs, placements, src_data_rank=None).to_local()
        finally:
            torch.distributed.destroy_process_group()
        expected = whole.numpy()[ours.slices(shape, rank)]
        assert ours.local_shape(shape, rank) == tuple(expected.shape)
        # DTensor gives a rank without rows a part that is empty along another dim as well.
        if expected.size or local.numel():
            np.testing.assert_array_equal(local.numpy(), expected)


test_parts()
print("150 layouts are DTensor's")
