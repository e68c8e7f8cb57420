"""Several point-to-point messages at once: ``P2POp`` and ``batch_isend_irecv``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from meshlib._c10d.functions.messages import irecv, isend
from meshlib._calls.call_queue import CallQueue
from meshlib._calls.spec import CallSpec
from meshlib._calls.work import Work, take
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._collectives.point_to_point import prepare_receive, prepare_send
from meshlib._job.current import Group, resolve_group


class P2POp:
    """One message of a batch.

    ``op`` is ``meshlib.isend`` or ``meshlib.irecv``. The other end is ``peer`` (a global rank) or
    ``group_peer`` (a rank in ``group``). A receive may omit both to accept a message from any
    member. Sends read ``tensor`` and receives write it: a NumPy, JAX or CuPy array or a buffer, of
    the same size and dtype at both ends. A receive replaces a read-only ``tensor`` (JAX). ``tag``
    is an integer from 0 to 2**32 - 1, equal at both ends. Raises ValueError for any other ``op``.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Any,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise ValueError(f"op must be meshlib.isend or meshlib.irecv, got {op!r}")
        self.op = op
        self.tensor: Any = tensor
        self.peer = peer
        self.group = group
        self.tag = tag
        self.group_peer = group_peer

    def __repr__(self) -> str:
        name = "isend to" if self.op is isend else "irecv from"
        peer = f"rank {self.peer}" if self.group_peer is None else f"group rank {self.group_peer}"
        return f"<P2POp {name} {peer}, tag {self.tag}>"


def _prepare(op: P2POp) -> tuple[CallQueue, CallSpec] | None:
    """Check the arguments; return the queue and the call. None if this rank is not a member."""
    group = resolve_group(op.group)
    if op.op is isend:
        spec = prepare_send(group, op.tensor, op.peer, op.tag, op.group_peer)
    else:
        put = partial(setattr, op, "tensor")
        spec = prepare_receive(group, op.tensor, op.peer, op.tag, op.group_peer, put=put)
    return None if spec is None else (call_queue_of(group), spec)


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work[Any]]:
    """Begin all messages of the list; return a ``Work`` for each, in the order of the list.

    Messages progress independently, so no order of the ranks' lists can deadlock. Messages between
    two ranks with the same tag match in the order of the lists. Operations on groups without this
    rank are skipped.

    Raises the errors of ``isend`` and ``irecv`` for invalid arguments, with the index in the list,
    before any message begins. Raises ValueError for an empty ``p2p_op_list``, TypeError for an
    entry that is not a ``P2POp``.
    """
    if not isinstance(p2p_op_list, Sequence) or not p2p_op_list:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"p2p_op_list must be a list with at least one P2POp, got {p2p_op_list!r}")
    prepared: list[tuple[CallQueue, CallSpec] | None] = []
    for i, op in enumerate(p2p_op_list):
        if not isinstance(op, P2POp):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"p2p_op_list[{i}] must be a P2POp, got {op!r}")
        try:
            prepared.append(_prepare(op))
        except (TypeError, ValueError) as error:
            raise type(error)(f"p2p_op_list[{i}]: {error}") from error
    works: list[Work[Any]] = [call[0].issue(call[1], True) for call in prepared if call is not None]
    for work in works:
        take(work)  # the P2POps hold the results, so they count as taken
    return works
