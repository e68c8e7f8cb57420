"""SUMMA: a product of matrices whose blocks lie on a square mesh."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

import meshlib as dist
from meshlib import DeviceMesh

Floats = NDArray[np.float64]


def product(mesh: DeviceMesh, a: Floats, b: Floats) -> Floats:
    """Return this rank's block of ``a @ b``, of its blocks of ``a`` and ``b``."""
    i, j = mesh.get_coordinate()
    along_row, along_column = mesh["columns"], mesh["rows"]
    c: Floats = np.zeros((a.shape[0], b.shape[1]))
    for k in range(along_row.size()):
        left = along_row.broadcast(a.copy() if j == k else np.empty_like(a), group_src=k)
        right = along_column.broadcast(
            b.copy() if i == k else np.empty_like(b), async_op=True, group_src=k
        )
        c += left @ right.result()
    return c


def main() -> float:
    """Multiply on every rank; return the greatest error."""
    side = math.isqrt(dist.get_world_size())
    names = ("rows", "columns")
    with dist.init_device_mesh("cpu", (side, side), mesh_dim_names=names) as mesh:
        i, j = mesh.get_coordinate()
        rng = np.random.default_rng(0)
        a: Floats = rng.normal(size=(4 * side, 4 * side))
        b: Floats = rng.normal(size=(4 * side, 4 * side))
        rows, columns = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
        block = product(mesh, a[rows, columns], b[rows, columns])
        error = np.abs(block - (a @ b)[rows, columns]).max(keepdims=True)
        return float(dist.all_reduce(error, dist.ReduceOp.MAX).item())
