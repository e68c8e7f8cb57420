"""Assumed by docs/program/mesh.md: arrays to reduce, and a training that fails."""

import numpy as np

import meshlib as dist

x, loss = np.ones(3), np.ones(1)
attempts = []


def train(mesh):
    attempts.append(mesh)
    strange = dist.get_rank() == 2 and len(attempts) == 1
    mesh["dp"].all_reduce(np.ones(4 if strange else 3))
    assert mesh["tp"].all_reduce(np.ones(1)) == 2
    assert mesh.all_reduce(np.ones(1)) == 4
    assert len(attempts) == 2
