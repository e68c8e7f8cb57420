"""The libraries that can be measured, by name."""

from __future__ import annotations

from meshlib.bench.c10d_libraries import (
    Meshlib,
    MeshlibShm,
    MeshlibSymmetric,
    MeshlibTcp,
    TorchGloo,
)
from meshlib.bench.jax_library import JaxGloo
from meshlib.bench.library import Library
from meshlib.bench.mpi_libraries import Mpich, OpenMpi

__all__ = ["LIBRARIES", "OWN", "Library", "MeshlibTcp", "TorchGloo"]

OWN: dict[str, type[Library]] = {
    library.name: library for library in (Meshlib, MeshlibShm, MeshlibTcp, MeshlibSymmetric)
}
"""This library, over each of its transports."""

LIBRARIES: dict[str, type[Library]] = OWN | {
    library.name: library for library in (TorchGloo, OpenMpi, Mpich, JaxGloo)
}
