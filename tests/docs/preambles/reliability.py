"""Assumed by docs/run/reliability.md: a mesh."""

import meshlib as dist

mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
