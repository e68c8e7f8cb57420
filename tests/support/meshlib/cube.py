"""The mesh that the tests slice."""

from __future__ import annotations

from meshlib._mesh.device_mesh import DeviceMesh


def cube() -> DeviceMesh:
    return DeviceMesh.from_shape("cpu", (2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))
