"""Checks of the parts that a global array is made of: those of this rank alone, or of all."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from meshlib.sharding.local import Array, array_module
from meshlib.sharding.sharding import Sharding
from transport.checks import to_whole_numbers


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
    if wrong is None and shape is not None:
        try:
            shape = tuple(to_whole_numbers(shape, "shape"))
        except TypeError as error:  # raised below, on all ranks
            wrong = str(error)
    told: dict[str, Any] = {"wrong": wrong}
    if wrong is None:
        told["local"] = tuple(local.shape)
        told["dtype"] = str(local.dtype)
        told["sharding"] = (sharding.dims, sharding.partial_dims)
        told["shape"] = shape
    answers: list[Any] = [None] * mesh.size()
    mesh.all_gather_object(answers, told)
    ranks = mesh.process_group.ranks
    for rank, answer in zip(ranks, answers, strict=True):
        if answer["wrong"] is not None:
            raise ValueError(f"rank {rank}: {answer['wrong']}")
        for what in ("dtype", "sharding", "shape"):
            if answer[what] != answers[0][what]:
                raise ValueError(
                    f"rank {rank} has {what} {answer[what]}, but rank {ranks[0]}"
                    f" {answers[0][what]}; expected the same on all ranks of {mesh}"
                )
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
