"""The names of meshes that ``import meshlib as dist`` shows: most programs need them, not all."""

from meshlib.mesh.config import MeshConfig
from meshlib.mesh.device_mesh import DeviceMesh, current_mesh
from meshlib.mesh.init import init_device_mesh
from meshlib.mesh.layout import Layout
from meshlib.mesh.spec import MeshDimError

__all__ = [
    "DeviceMesh",
    "Layout",
    "MeshConfig",
    "MeshDimError",
    "current_mesh",
    "init_device_mesh",
]
