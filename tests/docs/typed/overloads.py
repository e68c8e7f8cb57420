"""The result type of each form of ``async_op``, for type checkers alone."""

from __future__ import annotations

from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import meshlib as dist
from meshlib import DeviceMesh, Work

Floats = NDArray[np.float64]


def functions(x: Floats, xs: list[Floats], later: bool) -> None:
    """The functions of the module."""
    assert_type(dist.all_reduce(x), Floats)
    assert_type(dist.all_reduce(x, async_op=False), Floats)
    assert_type(dist.all_reduce(x, async_op=True), Work[Floats])
    assert_type(dist.all_reduce(x, dist.ReduceOp.SUM, None, True), Work[Floats])
    assert_type(dist.all_reduce(x, dist.ReduceOp.SUM, None, True, 5.0), Work[Floats])
    assert_type(dist.all_reduce(x, async_op=later), Floats | Work[Floats])
    assert_type(dist.all_reduce(x, dist.ReduceOp.SUM, None, later), Floats | Work[Floats])
    assert_type(dist.all_gather(xs, x, None, True), Work[list[Floats]])
    assert_type(dist.all_gather(xs, x, async_op=True, timeout=5.0), Work[list[Floats]])
    assert_type(dist.gather(x, None, 0, async_op=True), Work[list[Floats] | None])
    assert_type(dist.barrier(async_op=True), Work[None])
    assert_type(dist.barrier(None, True), Work[None])
    assert_type(dist.isend(x, 0), Work[None])
    assert_type(dist.irecv(x, 0), Work[Floats])


def methods(mesh: DeviceMesh, x: Floats, xs: list[Floats], later: bool) -> None:
    """The methods of meshes and groups."""
    dp = mesh["dp"]
    assert_type(dp.all_reduce(x), Floats)
    assert_type(dp.all_reduce(x, async_op=True), Work[Floats])
    assert_type(dp.all_reduce(x, dist.ReduceOp.SUM, True), Work[Floats])
    assert_type(dp.all_reduce(x, async_op=later), Floats | Work[Floats])
    assert_type(dp.all_to_all(xs, xs, True), Work[list[Floats]])
    assert_type(dp.reduce_scatter(x, xs, timeout=5.0, async_op=True), Work[Floats])
    assert_type(dp.broadcast(x, 0, later), Floats | Work[Floats])
    assert_type(dp.barrier(True), Work[None])
    assert_type(mesh.process_group.scatter(x, xs, 0, True), Work[Floats])
    i, j = mesh.get_coordinate()
    assert mesh.rank_at(i + j) >= 0
