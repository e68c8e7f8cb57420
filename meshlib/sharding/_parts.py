"""Checks of a global array's parts: of this rank's part alone, or of all ranks' parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from meshlib._groups.agreement import gather_or_raise
from meshlib.sharding._local import Array, array_module
from meshlib.sharding._sharding import Sharding
from transport._checks import to_whole_number, to_whole_numbers

if TYPE_CHECKING:
    import numpy as np

    from meshlib._mesh.device_mesh import DeviceMesh


def own_shape(local: Array, sharding: Sharding, shape: Sequence[int] | None) -> tuple[int, ...]:
    """Return the global shape for ``DArray.from_local(run_check=False)``; send nothing."""
    check_sharding(sharding)
    _check_part(local)
    sharding.check_shape(local.shape)
    if shape is None:
        sizes = sharding.mesh.shape
        lengths = tuple(
            length * prod(sizes[i] for i in sharding.split_of(d))
            for d, length in enumerate(local.shape)
        )
    else:
        lengths = tuple(to_whole_numbers(shape, "shape"))
    expected = sharding.local_shape(lengths)
    if tuple(local.shape) != expected:
        raise ValueError(
            f"local has shape {tuple(local.shape)}, but of {lengths} in {sharding} rank"
            f" {sharding.mesh.get_rank()} has {expected}"
        )
    return lengths


def agreed_shape(local: Array, sharding: Sharding, shape: Sequence[int] | None) -> tuple[int, ...]:
    """Return the global shape of the array that consists of the parts of all ranks.

    Raises ValueError on all ranks if the parts do not fit together.
    """
    check_sharding(sharding)
    mesh = sharding.mesh

    def describe() -> dict[str, Any]:
        try:
            _check_part(local)
            given = None if shape is None else tuple(to_whole_numbers(shape, "shape"))
        except TypeError as error:
            raise ValueError(f"rank {mesh.get_rank()}: {error}") from None
        own = {"local": tuple(local.shape), "dtype": str(local.dtype)}
        return {"sharding": repr(sharding), "shape": given, **own}

    answers = _agreed(mesh, describe, ("dtype", "sharding", "shape"))
    shape = answers[0]["shape"]
    ranks = mesh.process_group.ranks
    locals_ = [answer["local"] for answer in answers]
    for rank, own in zip(ranks, locals_, strict=True):
        if len(own) != len(locals_[0]) or len(own) < len(sharding.dims):
            raise ValueError(
                f"rank {rank}: local has shape {own}, which does not fit {locals_[0]} of rank"
                f" {ranks[0]} in {sharding}"
            )
    lengths = _summed(locals_, sharding) if shape is None else tuple(shape)
    for rank, own in zip(ranks, locals_, strict=True):
        expected = sharding.local_shape(lengths, rank)
        if own != expected:
            raise ValueError(
                f"rank {rank}: local has shape {own}, but of {lengths} in {sharding} it has"
                f" {expected}"
            )
    return lengths


def agreed_source(
    array: Any, sharding: Sharding, src_data_rank: Any
) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Return the group rank of ``distribute_array``'s source, and its array's shape and dtype.

    If an argument of one rank is wrong, all ranks raise the error.
    """
    mesh, rank = sharding.mesh, sharding.mesh.get_rank()

    def describe() -> dict[str, Any]:
        src = to_whole_number(src_data_rank, "src_data_rank")
        described: dict[str, Any] = {"sharding": repr(sharding), "src_data_rank": src}
        if not 0 <= src < mesh.size():
            raise ValueError(f"src_data_rank is {src}; expected 0 to {mesh.size() - 1}, in {mesh}")
        if mesh.process_group.rank() == src:
            if array_module(array) is None:
                raise TypeError(
                    f"array is a {type(array).__name__} on rank {rank}; expected a NumPy or CuPy"
                    " array"
                )
            sharding.check_shape(array.shape)
            described["array"] = tuple(array.shape), array.dtype
        return described

    answers = _agreed(mesh, describe, ("sharding", "src_data_rank"))
    src = answers[0]["src_data_rank"]
    return src, *answers[src]["array"]


def _agreed(
    mesh: DeviceMesh, describe: Callable[[], dict[str, Any]], same: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the value that ``describe`` returns on each rank of ``mesh``, in group order.

    If ``describe`` raises on one rank, all ranks raise. Raises ValueError if the entries named in
    ``same`` differ.
    """
    if mesh.coordinate_of(mesh.get_rank()) is None:
        raise ValueError(f"rank {mesh.get_rank()} is not in {mesh}, so it has no part of the array")
    ranks = mesh.process_group.ranks
    answers = gather_or_raise(mesh.process_group, describe)
    first = answers[0]
    for rank, answer in zip(ranks, answers, strict=True):
        for what in same:
            if answer[what] != first[what]:
                raise ValueError(
                    f"rank {rank} has {what} {answer[what]}, but rank {ranks[0]} has {first[what]};"
                    f" expected the same on all ranks of {mesh}"
                )
    return answers


def check_sharding(sharding: Any) -> None:
    """Raise TypeError, on this rank only, unless it is a Sharding: other ranks are unknown."""
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"sharding is {sharding!r}; expected a Sharding, such as Sharding(mesh, P('dp'))"
        )


def _check_part(local: Any) -> None:
    """Raise TypeError unless ``local`` is an array that may be a part."""
    if array_module(local) is None:
        raise TypeError(
            f"local is a {type(local).__module__}.{type(local).__qualname__}; expected a NumPy or"
            " CuPy array (for jax.Array use DArray.from_jax)"
        )


def _summed(shapes: Sequence[tuple[int, ...]], sharding: Sharding) -> tuple[int, ...]:
    """Return the sum of the parts' lengths along each dim; ``shapes`` are in mesh order."""
    sizes = sharding.mesh.shape
    strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    lengths: list[int] = []
    for d in range(len(shapes[0])):
        places = [0]
        for i in sharding.split_of(d):
            places = [place + at * strides[i] for place in places for at in range(sizes[i])]
        lengths.append(sum(shapes[place][d] for place in places))
    return tuple(lengths)
