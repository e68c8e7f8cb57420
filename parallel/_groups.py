"""The argument type with which public functions and classes accept a set of ranks."""

from __future__ import annotations

from typing import Any, Protocol

import meshlib
from meshlib import DeviceMesh, ProcessGroup
from parallel._checks import check_instance


class GroupLike(Protocol):
    """A set of ranks that can communicate: a ``DeviceMesh`` or a ``ProcessGroup``."""

    @property
    def process_group(self) -> ProcessGroup:
        """The group of all these ranks."""
        ...


def resolve(ranks: GroupLike | None, argument: str) -> ProcessGroup:
    """Return the group of ``ranks``, or the default group when None.

    Raises ValueError when this rank is not a member, and TypeError for a value that is not a set
    of ranks. Both name ``argument``.
    """
    group = meshlib.group.WORLD if ranks is None else getattr(ranks, "process_group", None)
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"{argument} must be a DeviceMesh or a ProcessGroup, such as mesh['dp'], got {ranks!r}"
        )
    if group.rank() < 0:
        raise ValueError(f"{argument}: this rank is not a member of {group}")
    return group


def gathered(own: Any, group: ProcessGroup) -> list[Any]:
    """Return all members' ``own`` values by group rank. A collective that pickles the values."""
    values: list[Any] = [None] * group.size()
    group.all_gather_object(values, own)
    return values


def same_dims(ranks: GroupLike | None, mesh: DeviceMesh, what: str) -> DeviceMesh:
    """Return the slice of ``mesh`` along the dims of the slice ``ranks``.

    Raises ValueError when ``ranks`` is not a slice of a mesh with names; the message names
    ``what`` as the object that was made over ``ranks``.
    """
    names = ranks.mesh_dim_names if isinstance(ranks, DeviceMesh) else None
    if names is None:
        raise ValueError(
            f"{what} was made over {ranks!r}; to continue with other ranks, make it over a slice"
            " of a mesh whose dims have names, such as mesh['dp']"
        )
    return mesh[names]


def check_shard_mesh(mesh: Any) -> str:
    """Raise for a value that is not a mesh to shard over; return a prefix for other messages."""
    check_instance(mesh, DeviceMesh, "mesh", "mesh['dp_shard']")
    where = f"rank {mesh.get_rank()}"
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"{where}: mesh {mesh.described()} has {mesh.ndim} dims; expected one to shard over,"
            " or two: the first to replicate over, the second to shard over"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{where}: this rank is not in the mesh {mesh}; expected one of its ranks")
    return where
