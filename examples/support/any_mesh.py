"""The roles of a mesh's dims."""

from __future__ import annotations

from meshlib import DeviceMesh


def replicas_and_tp(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of a model's replicas, and that of the ranks that share one replica.

    The latter is the dim ``tp``; all other dims count replicas, whatever their names. A mesh
    without ``tp`` has replicas of one rank, one with nothing else a single replica.
    """
    names = mesh.mesh_dim_names or ()
    if "tp" not in names:
        mesh = mesh.unflatten(names[-1], (-1, 1), (names[-1], "tp"))
    elif len(names) == 1:
        names, mesh = ("dp", "tp"), mesh.unflatten("tp", (1, -1), ("dp", "tp"))
    return mesh[tuple(name for name in names if name != "tp")], mesh["tp"]
