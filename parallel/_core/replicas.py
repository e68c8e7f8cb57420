"""Operations on replicas: compare them, copy one rank's arrays to all, average arrays."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager

from meshlib import ProcessGroup, ReduceOp, error_feedback
from parallel._arrays import Array, namespace, pieces, placement
from parallel._core.assignment import MIB, assign_buckets
from parallel._groups import gathered

_COALESCE_BYTES = 64 * MIB


ArgumentError = TypeError | ValueError | RuntimeError
"""The errors that wrong arguments raise."""

_KINDS = (TypeError, ValueError, RuntimeError)


@contextmanager
def raise_on_all_ranks(group: ProcessGroup | None) -> Generator[None]:
    """Return a context whose argument errors are raised on all members of ``group``.

    The members without an error must call ``check_same`` next. With None, only this rank raises.
    """
    try:
        yield
    except _KINDS as error:
        if group is not None:
            check_same(error, group)
        raise


def check_same(
    own: Sequence[str] | ArgumentError, group: ProcessGroup, what: str = "the model"
) -> None:
    """Raise ValueError on every rank if the ranks' descriptions of ``what`` differ from rank 0's.

    A rank with an argument error passes the error instead of a description; all ranks raise it.
    """
    description: Sequence[str] | None = None if isinstance(own, Exception) else own
    reference = [description]
    group.broadcast_object_list(reference, group_src=0)
    problem: str | None = None
    if isinstance(own, Exception):
        problem = str(own)
    elif reference[0] is not None:
        problem = first_difference(own, reference[0])
    own_kind = next((kind for kind in _KINDS if isinstance(own, kind)), None)
    problems: list[tuple[type[ArgumentError] | None, str | None]]
    problems = gathered((own_kind, problem), group)
    if isinstance(own, Exception):
        raise own
    for rank, (kind, text) in enumerate(problems):
        if kind is not None:
            raise kind(f"rank {rank} of {group}: {text}")
    differences = [text for _, text in problems]
    rows = [f"  rank {rank}: {text}" for rank, text in enumerate(differences) if text]
    if rows:
        raise ValueError(f"{what} is not the same on all ranks of {group}:\n" + "\n".join(rows))


def describe_options(**options: object) -> list[str]:
    """Return one line for each option that must be the same on all replicas."""
    return [f"option {name}={value}" for name, value in options.items()]


def first_difference(own: Sequence[str], reference: Sequence[str]) -> str | None:
    """Return a predicate about the first difference of two descriptions, or None."""
    for entry, expected in zip(own, reference, strict=False):
        if entry != expected:
            return f"has {entry} where rank 0 has {expected}"
    if len(own) > len(reference):
        return f"has {own[len(reference)]}, which rank 0 lacks"
    if len(own) < len(reference):
        return f"lacks {reference[len(own)]}, which rank 0 has"
    return None


def broadcast_coalesced(arrays: Sequence[Array], group: ProcessGroup, group_src: int = 0) -> None:
    """Copy ``arrays`` of group rank ``group_src`` to all ranks, in few large messages."""
    if group.size() == 1:
        return
    for batch in _batches(arrays):
        flat = _flattened(batch)
        group.broadcast(flat, group_src=group_src)
        if group.rank() != group_src:
            _unflatten(flat, batch)


def average_coalesced(
    arrays: Sequence[Array],
    group: ProcessGroup,
    counting: Collection[int] | None = None,
    residuals: Sequence[Array] | None = None,
) -> None:
    """Replace ``arrays`` by their averages over the group, in few large messages.

    ``counting`` has the group ranks whose arrays count, the same on all ranks; None: all. If it is
    empty, arrays do not change and no collective runs. ``residuals``, for error feedback, has a
    NumPy array of float32 for each array, which is added and then updated.
    """
    residual_of = {} if residuals is None else dict(zip(map(id, arrays), residuals, strict=True))
    count = group.size() if counting is None else len(counting)
    if group.size() == 1 or not count:
        return
    for batch in _batches(arrays):
        flat = _flattened(batch)
        if counting is not None and group.rank() not in counting:
            flat.fill(0)
        parts = [residual_of[id(array)] for array in batch if residual_of]
        residual = _flattened(parts) if parts else None
        op = ReduceOp.AVG if residual is None else error_feedback(ReduceOp.AVG, residual)
        group.all_reduce(flat, op=op)
        if residual is not None:
            _unflatten(residual, parts)
        if count != group.size():
            flat *= group.size() / count
        _unflatten(flat, batch)


def _batches(arrays: Sequence[Array]) -> list[list[Array]]:
    """Return ``arrays`` in batches of one dtype and device, of about the size limit."""
    batches = assign_buckets(
        range(len(arrays)),
        [array.nbytes for array in arrays],
        [placement(array) for array in arrays],
        _COALESCE_BYTES,
        _COALESCE_BYTES,
    )
    return [[arrays[number] for number in batch] for batch in batches]


def _flattened(arrays: Sequence[Array]) -> Array:
    return namespace(arrays[0]).concatenate([array.reshape(-1) for array in arrays])


def _unflatten(flat: Array, arrays: Sequence[Array]) -> None:
    for array, piece in zip(arrays, pieces(flat, (x.shape for x in arrays)), strict=True):
        array[...] = piece
