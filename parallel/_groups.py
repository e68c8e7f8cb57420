"""The argument by which public functions and classes here take their ranks."""

from __future__ import annotations

from typing import Any, Protocol

import meshlib
from meshlib import DeviceMesh, ProcessGroup
from parallel._checks import check_instance


class GroupLike(Protocol):
    """A set of ranks that can be communicated over: a ``DeviceMesh`` or a ``ProcessGroup``."""

    @property
    def process_group(self) -> ProcessGroup:
        """The group over all the ranks."""
        ...


def resolve(ranks: GroupLike | None, argument: str) -> ProcessGroup:
    """Return the group of ``ranks``, or the default group when None.

    Raises, naming ``argument``, ValueError when this rank is not a member, and TypeError for a
    value that is not a set of ranks.
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
    """Return the ``own`` of all members, by group rank. A collective that pickles them."""
    everybody: list[Any] = [None] * group.size()
    group.all_gather_object(everybody, own)
    return everybody


def same_dims(ranks: GroupLike | None, mesh: DeviceMesh, what: str) -> DeviceMesh:
    """Return the slice of ``mesh`` along the dims of the slice ``ranks``, which ``what`` was given.

    Raises ValueError when ``ranks`` is not a slice of a mesh with names.
    """
    names = ranks.mesh_dim_names if isinstance(ranks, DeviceMesh) else None
    if names is None:
        raise ValueError(
            f"{what} was made over {ranks!r}; to go on with other ranks it has to be made over a"
            " slice of a mesh whose dims have names, such as mesh['dp']"
        )
    return mesh[names]


def check_shard_mesh(mesh: Any) -> str:
    """Raise for a value that is not a mesh to shard over; return what messages of others begin
    with."""
    check_instance(mesh, DeviceMesh, "mesh", "mesh['dp_shard']")
    where = f"rank {mesh.get_rank()}"
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"{where}: mesh {mesh.described()} has {mesh.ndim} dims; expected one to shard over,"
            " or two: to replicate over and to shard over"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{where}: mesh: this rank is not in {mesh}; expected one of its ranks")
    return where
