"""The measurable libraries, by name."""

from __future__ import annotations

from meshlib._bench.libraries.c10d import (
    Meshlib,
    MeshlibShm,
    MeshlibSymmetric,
    MeshlibTcp,
    TorchGloo,
)
from meshlib._bench.libraries.jax_gloo import JaxGloo
from meshlib._bench.libraries.library import Library
from meshlib._bench.libraries.mpi import Mpich, OpenMpi

__all__ = ["LIBRARIES", "OWN", "Library", "MeshlibTcp", "TorchGloo"]

OWN: dict[str, type[Library]] = {
    library.name: library for library in (Meshlib, MeshlibShm, MeshlibTcp, MeshlibSymmetric)
}
"""This library, over each of its transports."""

LIBRARIES: dict[str, type[Library]] = OWN | {
    library.name: library for library in (TorchGloo, OpenMpi, Mpich, JaxGloo)
}
