"""The dims of a mesh as replicas and tensor parallel ranks."""

from __future__ import annotations

from meshlib import DeviceMesh


def replicas_and_tp(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of a model's replicas, and the mesh of the ranks that share one replica.

    The ranks of a replica are along the dim ``tp``; all other dims are dims of replicas. Without
    ``tp``, each replica has one rank. A mesh with only ``tp`` has a single replica.
    """
    names = mesh.mesh_dim_names or ()
    if "tp" not in names:
        mesh = mesh.unflatten(names[-1], (-1, 1), (names[-1], "tp"))
    elif len(names) == 1:
        names, mesh = ("dp", "tp"), mesh.unflatten("tp", (1, -1), ("dp", "tp"))
    return mesh[tuple(name for name in names if name != "tp")], mesh["tp"]
