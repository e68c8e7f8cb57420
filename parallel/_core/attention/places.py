"""Which places of a sequence are whose: in a row, or a zig-zag that balances causal attention."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshlib import ProcessGroup
from meshlib.extend import to_whole_number
from parallel._arrays import Array
from parallel._checks import check_array
from parallel._groups import Ranks, resolve


def sequence_positions(
    length: int, mesh: Ranks | None = None, *, zigzag: bool = True
) -> npt.NDArray[np.int64]:
    """Return which places of the sequence the ``length`` places of this rank are, (length,).

    In a zig-zag the sequence is cut into two chunks for each of n ranks, and rank r has chunks r
    and 2n - 1 - r: an early one, to which few keys come before it, and a late one, so that causal
    attention is the same work on all ranks. In a row, rank r has the r-th of n chunks.

    Args:
        length: how many places each rank has; even for a zig-zag.
        mesh: the ranks: ``mesh["cp"]``, a process group, or None for the default group.
        zigzag: whether the order is a zig-zag, or a row.

    Returns:
        Whole numbers in [0, length * n), ascending.

    Raises:
        ValueError: for an odd length and a zig-zag.
        TypeError: for what is no whole number or no set of ranks.
    """
    return positions_of(to_whole_number(length, "length"), resolve(mesh, "mesh"), zigzag)


def positions_of(length: int, group: ProcessGroup, zigzag: bool) -> npt.NDArray[np.int64]:
    """Return ``sequence_positions`` over a group."""
    rank, size = group.rank(), group.size()
    if not zigzag:
        return np.arange(rank * length, (rank + 1) * length)
    half = half_of(length, size)
    late = (2 * size - 1 - rank) * half
    return np.concatenate([np.arange(rank * half, (rank + 1) * half), np.arange(late, late + half)])


def half_of(length: int, size: int) -> int:
    """Return the length of one of a rank's two chunks; raise ValueError when that is not whole."""
    half, rest = divmod(length, 2)
    if rest:
        raise ValueError(
            f"each of {size} ranks has {length} places of a sequence of {length * size}, which"
            f" does not divide by the {2 * size} chunks of a zig-zag, two for each rank"
        )
    return half


def split_sequence(
    x: Array, mesh: Ranks | None = None, *, dim: int = 1, zigzag: bool = True
) -> Array:
    """Return this rank's places of whole sequences, the same on all ranks: nothing is sent.

    Args:
        x: an array whose dim ``dim`` is the sequence, such as tokens (batch, length).
        mesh: the ranks: ``mesh["cp"]``, a process group, or None for the default group.
        dim: which dim is the sequence.
        zigzag: the order, see ``sequence_positions``; that of the attention.

    Returns:
        A copy with 1/n of the places.

    Raises:
        ValueError: for a length that does not divide by the ranks, or by twice their number for a
            zig-zag, or a dim that is not there.
        TypeError: for what is no array or no set of ranks.
    """
    check_array(x, "x")
    group = resolve(mesh, "mesh")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"x of shape {list(x.shape)} has no dim {dim}")
    length, rest = divmod(x.shape[dim], group.size() * (2 if zigzag else 1))
    if rest:
        chunks = f"{2 * group.size()} chunks of a zig-zag, two for each" if zigzag else "parts for"
        raise ValueError(
            f"dim {dim} of x is {x.shape[dim]} long, which does not divide by the {chunks} of"
            f" {group.size()} ranks"
        )
    return x.take(positions_of(length * (2 if zigzag else 1), group, zigzag), axis=dim)
