"""Checks of the parts that a global array is made of: those of this rank alone, or of all."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from meshlib.sharding.local import Array, array_module
from meshlib.sharding.sharding import Sharding
from transport.checks import to_whole_number, to_whole_numbers

if TYPE_CHECKING:
    import numpy as np

    from meshlib.mesh.device_mesh import DeviceMesh


def own_shape(local: Array, sharding: Sharding, shape: Sequence[int] | None) -> tuple[int, ...]:
    """Return the global shape, as ``DArray.from_local`` finds it without asking other ranks."""
    check_sharding(sharding)
    wrong = _wrong_part(local)
    if wrong is not None:
        raise TypeError(wrong)
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
    """Return the global shape that the parts of all ranks make up.

    Raises ValueError on all of them when they make up none.
    """
    check_sharding(sharding)
    mesh = sharding.mesh
    if mesh.coordinate_of(mesh.get_rank()) is None:
        raise ValueError(f"rank {mesh.get_rank()} is not in {mesh}, so it has no part of the array")
    wrong = _wrong_part(local)
    told: dict[str, Any] = {"sharding": repr(sharding), "shape": None}
    if wrong is None:
        told |= {"local": tuple(local.shape), "dtype": str(local.dtype)}
        try:
            told["shape"] = None if shape is None else tuple(to_whole_numbers(shape, "shape"))
        except TypeError as error:  # raised below, on all ranks
            wrong = str(error)
    error = None if wrong is None else ValueError(f"rank {mesh.get_rank()}: {wrong}")
    answers = _agreed(mesh, error, told, ("dtype", "sharding", "shape"))
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
    """Return the group rank that has the values of ``distribute_array``, their shape and dtype.

    Raises on all ranks what is wrong with the arguments of one.
    """
    mesh, rank = sharding.mesh, sharding.mesh.get_rank()
    if mesh.coordinate_of(rank) is None:
        raise ValueError(f"rank {rank} is not in {mesh}, so it has no part of the array")
    wrong: Exception | None = None
    told: dict[str, Any] = {"sharding": repr(sharding)}
    try:
        src = told["src_data_rank"] = to_whole_number(src_data_rank, "src_data_rank")
        if not 0 <= src < mesh.size():
            raise ValueError(f"src_data_rank is {src}; expected 0 to {mesh.size() - 1}, in {mesh}")
        if mesh.process_group.rank() == src:
            if array_module(array) is None:
                raise TypeError(
                    f"array is a {type(array).__name__} on rank {rank}; expected a NumPy or CuPy"
                    " array"
                )
            sharding.check_shape(array.shape)
            told["array"] = tuple(array.shape), array.dtype
    except (TypeError, ValueError) as error:  # raised below, on all ranks
        wrong = error
    answers = _agreed(mesh, wrong, told, ("sharding", "src_data_rank"))
    src = answers[0]["src_data_rank"]
    return src, *answers[src]["array"]


def _agreed(
    mesh: DeviceMesh, wrong: Exception | None, told: dict[str, Any], same: Sequence[str]
) -> list[dict[str, Any]]:
    """Return what each rank of ``mesh`` has ``told``, in the order of its group.

    Raises on all of them what is ``wrong`` on one, and ValueError where entries that are to be the
    ``same`` differ.
    """
    answers: list[Any] = [None] * mesh.size()
    found = None if wrong is None else (isinstance(wrong, TypeError), str(wrong))
    mesh.all_gather_object(answers, (found, told))
    if wrong is not None:
        raise wrong
    ranks = mesh.process_group.ranks
    for rank, (found, _) in zip(ranks, answers, strict=True):
        if found is not None:
            raise (TypeError if found[0] else ValueError)(f"rank {rank}: {found[1]}")
    first = answers[0][1]
    for rank, (_, answer) in zip(ranks, answers, strict=True):
        for what in same:
            if answer[what] != first[what]:
                raise ValueError(
                    f"rank {rank} has {what} {answer[what]}, but rank {ranks[0]} {first[what]};"
                    f" expected the same on all ranks of {mesh}"
                )
    return [answer for _, answer in answers]


def check_sharding(sharding: Any) -> None:
    """Raise TypeError unless it is a Sharding; without one there is no mesh to tell others over."""
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"sharding is {sharding!r}; expected a Sharding, such as Sharding(mesh, P('dp'))"
        )


def _wrong_part(local: Any) -> str | None:
    """Return what is wrong with the type of ``local``, None if nothing is."""
    if array_module(local) is None:
        return (
            f"local is a {type(local).__module__}.{type(local).__qualname__}; expected a NumPy or"
            " CuPy array (for jax.Array there is DArray.from_jax)"
        )
    return None


def _summed(shapes: Sequence[tuple[int, ...]], sharding: Sharding) -> tuple[int, ...]:
    """Return the lengths of the parts along each dim, added up; the ranks are in mesh order."""
    sizes = sharding.mesh.shape
    strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    lengths: list[int] = []
    for d in range(len(shapes[0])):
        places = [0]
        for i in sharding.split_of(d):
            places = [place + at * strides[i] for place in places for at in range(sizes[i])]
        lengths.append(sum(shapes[place][d] for place in places))
    return tuple(lengths)
