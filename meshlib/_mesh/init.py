"""``init_device_mesh``: the mesh over all ranks of the job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshlib._groups.nccl_splits import connect, split
from meshlib._job.current import current_world
from meshlib._job.starting.gpu import choose_cuda_device
from meshlib._job.starting.init import ensure_world
from meshlib._mesh.config import MeshConfig
from meshlib._mesh.device_mesh import DeviceMesh, show_place
from meshlib._mesh.names import Compress, DimKey
from meshlib._mesh.spec import check_dim_names, check_shape, describe_dims, infer_sizes
from meshlib._mesh.value import check_device_type
from transport import _environment as environment
from transport._cuda.driver import Driver, cuda_driver
from transport._waiting.deadline import Timeout


def init_device_mesh(
    device_type: str = "cpu",
    mesh_shape: Sequence[int] | None = None,
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend: str | None = None,
    timeout: Timeout | None = None,
    backend_override: Mapping[DimKey, str] | None = None,
    timeout_override: Mapping[DimKey, Timeout] | None = None,
    compress: Mapping[DimKey, Compress] | None = None,
) -> DeviceMesh:
    """Return the mesh over all ranks of the job, in C order; every rank must call it.

    One size in ``mesh_shape`` may be -1. Without ``mesh_shape``, the mesh is the one that the job
    was started with: ``meshrun --mesh dp=2,tp=2``, or ``--mesh FILE`` with all options in the file.
    Initialises the default process group from the environment if necessary.

    The dims are named by ``mesh_dim_names``. Groups are made with ``backend`` and ``timeout``
    (seconds, a timedelta or ``"30s"``), or by dim (name or number) with ``backend_override`` and
    ``timeout_override``. The defaults are the job's. Large sums and averages between hosts may be
    compressed by dim, with ``compress``: ``"bf16"``, ``"fp8"``, ``"int8"`` or a ``Compression``.

    With ``device_type="cuda"``, GPU number ``LOCAL_RANK`` becomes the calling thread's current one.
    If ``init_process_group`` got a ``device_id``, that GPU is used instead, and NCCL connects the
    groups of all dims here, not at their first calls. Calls use NCCL unless ``backend`` names
    another backend. If a host has fewer GPUs than ranks, ranks share them with a warning, and
    arrays are sent through the host. Raises DistBackendError, which names the remedy, without a
    GPU, driver or CuPy.

    Raises ValueError when the shape does not fit the world size, if possible before the job
    starts. For a mesh over some of the ranks use ``DeviceMesh``.
    """
    check_device_type(device_type)
    if device_type == "cuda":
        chosen = choose_cuda_device(ensure_world())
        backend = backend or (chosen if mesh_shape is not None else None)
    options: dict[str, Any] = {
        "mesh_dim_names": mesh_dim_names,
        "backend": backend,
        "timeout": timeout,
        "backend_override": backend_override,
        "timeout_override": timeout_override,
        "compress": compress,
    }
    if mesh_shape is None:
        for argument, value in options.items():
            if value is not None:
                raise ValueError(f"{argument} is given without mesh_shape; expected both")
        return _bound(_started_with().build(device_type))
    shape = check_shape(mesh_shape)
    names = check_dim_names(mesh_dim_names, len(shape))
    ranks = ensure_world().membership.whole
    sizes = infer_sizes(shape, len(ranks), f"mesh_shape {describe_dims(names, shape)}")
    mesh = DeviceMesh.from_shape(device_type, sizes, **options)
    if ranks != range(len(ranks)):
        mesh = mesh.with_ranks(np.reshape(ranks, sizes))
    return _bound(mesh)


def _bound(mesh: DeviceMesh) -> DeviceMesh:
    """Return ``mesh``, with its NCCL groups connected if ranks are bound to their GPUs."""
    world = current_world()
    show_place(mesh, world)
    device = world.cuda_device
    inside = mesh.get_coordinate() is not None
    if mesh.device_type == "cuda" and device is not None and inside:
        _connect(mesh, cuda_driver(), device)
    return mesh


def _connect(mesh: DeviceMesh, driver: Driver, device: int) -> None:
    """Connect the group of all ranks of ``mesh``, and split the groups along each dim from it.

    Every rank of the mesh must call it, on its GPU.
    """
    parent = mesh.process_group
    connect(parent, driver, device)
    for dim in range(mesh.ndim):
        if mesh.size(dim) == len(parent.ranks):
            continue  # the group has the parent's ranks, and may be the parent
        split(parent, mesh.get_group(dim), [mesh.shape, (dim,)])


def _started_with() -> MeshConfig:
    text = os.environ.get(environment.MESH)
    if not text:
        raise ValueError(
            f"mesh_shape is missing and so is the environment variable {environment.MESH};"
            " give the shape, or start with `meshrun --mesh dp=2,tp=2`"
        )
    try:
        return MeshConfig.parse(text)
    except (ValueError, OSError) as error:
        raise ValueError(f"environment variable {environment.MESH}: {error}") from error
