"""The six dims that a mesh may have, and what each is for here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshlib import DeviceMesh

NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


@dataclass(frozen=True)
class Sizes:
    """How many ranks each dim has. Raises ValueError for another dim's name."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, dims: Mapping[str, int]) -> Sizes:
        """Return the sizes of a mesh's dims."""
        unknown = [name for name in dims if name not in NAMES]
        if unknown:
            raise ValueError(
                f"the mesh has dim {unknown[0]!r}; expected some of {', '.join(NAMES)}"
            )
        return cls(**dims)

    @property
    def replicas(self) -> int:
        """How many ranks have other sequences each."""
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def sharing(self) -> int:
        """How many ranks have other tokens each: the same parameters, except for experts."""
        return self.replicas * self.cp


class Dims:
    """A mesh with all six dims; those that the given one lacks have one rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        self.sizes = Sizes.of(dict(zip(names, mesh.shape, strict=False)))
        missing = [name for name in NAMES if name not in names]
        if missing:
            ones = (1,) * len(missing)
            mesh = mesh.unflatten(names[-1], (-1, *ones), (names[-1], *missing))
        self.mesh = mesh
        for name in NAMES:
            setattr(self, name, mesh[name])
        self.sequences = mesh["dp_replicate", "dp_shard", "ep"]
        """The ranks that have other sequences each: a step's batch is dealt out to them."""
        self.tokens = mesh["dp_replicate", "dp_shard", "ep", "cp"]
        """Those that have other tokens each: losses and gradients are averaged over them."""
        mesh["dp_replicate", "ep", "cp"].flatten("copies")
        mesh["dp_replicate", "cp"].flatten("copies_of_experts")
        self.dense = mesh["copies", "dp_shard"]
        """Over which parameters are replicated, and split (``fully_shard``)."""
        self.experts = mesh["copies_of_experts", "dp_shard"]
        """Those of experts, which ``ep`` has split before."""

    pp: DeviceMesh
    dp_replicate: DeviceMesh
    dp_shard: DeviceMesh
    cp: DeviceMesh
    tp: DeviceMesh
    ep: DeviceMesh
