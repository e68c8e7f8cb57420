"""Replicas: say how ranks differ, copy one's arrays to all, average arrays."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager

from meshlib import ProcessGroup, ReduceOp, error_feedback
from parallel._arrays import Array, namespace, pieces, placement
from parallel._core.assignment import MIB, assign_buckets
from parallel._groups import gathered

_COALESCE_BYTES = 64 * MIB


Wrong = TypeError | ValueError | RuntimeError
"""The errors of arguments."""

_KINDS = (TypeError, ValueError, RuntimeError)


@contextmanager
def raise_on_all_ranks(group: ProcessGroup | None) -> Generator[None]:
    """Raise one rank's error in its arguments, in this block, on all members.

    The other members must call ``check_same`` next. With None, only this rank raises.
    """
    try:
        yield
    except _KINDS as error:
        if group is not None:
            check_same(error, group)
        raise


def check_same(own: Sequence[str] | Wrong, group: ProcessGroup, what: str = "the model") -> None:
    """Raise ValueError, on every rank, when a rank's description of ``what`` is not rank 0's.

    A rank with an error in its arguments passes that instead of a description: all raise it.
    """
    mine: Sequence[str] | None = None if isinstance(own, Exception) else own
    reference = [mine]
    group.broadcast_object_list(reference, group_src=0)
    told: str | None = None
    if isinstance(own, Exception):
        told = str(own)
    elif reference[0] is not None:
        told = first_difference(own, reference[0])
    kind_of_own = next((kind for kind in _KINDS if isinstance(own, kind)), None)
    answers: list[tuple[type[Wrong] | None, str | None]] = gathered((kind_of_own, told), group)
    if isinstance(own, Exception):
        raise own
    for rank, (kind, text) in enumerate(answers):
        if kind is not None:
            raise kind(f"rank {rank} of {group}: {text}")
    differences = [text for _, text in answers]
    rows = [f"  rank {rank}: {text}" for rank, text in enumerate(differences) if text]
    if rows:
        raise ValueError(f"{what} is not the same on all ranks of {group}:\n" + "\n".join(rows))


def describe_options(**options: object) -> list[str]:
    """Return one line for each of a wrapper's options that must agree between replicas."""
    return [f"option {name}={value}" for name, value in options.items()]


def first_difference(own: Sequence[str], reference: Sequence[str]) -> str | None:
    """Return a sentence about the first entry in which two descriptions differ, or None."""
    for mine, theirs in zip(own, reference, strict=False):
        if mine != theirs:
            return f"has {mine} where rank 0 has {theirs}"
    if len(own) > len(reference):
        return f"has {own[len(reference)]}, which rank 0 lacks"
    if len(own) < len(reference):
        return f"lacks {reference[len(own)]}, which rank 0 has"
    return None


def broadcast_coalesced(arrays: Sequence[Array], group: ProcessGroup, group_src: int = 0) -> None:
    """Copy ``arrays`` of group rank ``group_src`` into everybody's, in few large messages."""
    if group.size() == 1:
        return
    for pile in _piles(arrays):
        flat = _flattened(pile)
        group.broadcast(flat, group_src=group_src)
        if group.rank() != group_src:
            _unflatten(flat, pile)


def average_coalesced(
    arrays: Sequence[Array],
    group: ProcessGroup,
    counting: Collection[int] | None = None,
    residuals: Sequence[Array] | None = None,
) -> None:
    """Replace ``arrays`` by their averages over the group, in few large messages.

    ``counting``: the group ranks whose arrays count, the same on all; None: all. With none of them
    arrays are left as they are, and no call is made. ``residuals``: one for each array, for error
    feedback: NumPy arrays of float32, added to and written to.
    """
    left = {} if residuals is None else dict(zip(map(id, arrays), residuals, strict=True))
    count = group.size() if counting is None else len(counting)
    if group.size() == 1 or not count:
        return
    for pile in _piles(arrays):
        flat = _flattened(pile)
        if counting is not None and group.rank() not in counting:
            flat.fill(0)
        parts = [left[id(array)] for array in pile if left]
        residual = _flattened(parts) if parts else None
        op = ReduceOp.AVG if residual is None else error_feedback(ReduceOp.AVG, residual)
        group.all_reduce(flat, op=op)
        if residual is not None:
            _unflatten(residual, parts)
        if count != group.size():
            flat *= group.size() / count
        _unflatten(flat, pile)


def _piles(arrays: Sequence[Array]) -> list[list[Array]]:
    """Return ``arrays`` in piles of one dtype and device, each not much above the limit."""
    piles = assign_buckets(
        range(len(arrays)),
        [array.nbytes for array in arrays],
        [placement(array) for array in arrays],
        _COALESCE_BYTES,
        _COALESCE_BYTES,
    )
    return [[arrays[number] for number in pile] for pile in piles]


def _flattened(pile: Sequence[Array]) -> Array:
    return namespace(pile[0]).concatenate([array.reshape(-1) for array in pile])


def _unflatten(flat: Array, pile: Sequence[Array]) -> None:
    for array, piece in zip(pile, pieces(flat, (x.shape for x in pile)), strict=True):
        array[...] = piece
