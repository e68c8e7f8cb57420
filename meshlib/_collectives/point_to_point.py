"""Messages from one member of a group to another, with tags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from meshlib._arrays import adapter as arrays
from meshlib._arrays.checks import check_dtype
from meshlib._calls.spec import CallSpec
from meshlib._calls.work import ReceivedMessage, Work
from meshlib._collectives.group_of_ranks import (
    ARRAYS,
    NO_MEMBER,
    GroupOfRanks,
    call_queue_of,
    make_fast,
    resolve_rank,
)
from meshlib._recording.recorder import ANY_SOURCE
from transport._calls.call import Call
from transport._calls.header import NO_ROOT, Kind
from transport._checks import to_whole_number
from transport._communicators.base import Communicator
from transport._waiting.deadline import Timeout

A = TypeVar("A")

MAX_TAG = 2**32 - 1
# Looking up a member of an enumeration takes time in each call.
_SEND, _RECV = Kind.SEND, Kind.RECV


class PointToPoint(GroupOfRanks):
    """``send``, ``recv`` and their asynchronous forms.

    Messages between two members with the same tag arrive in order. If the receiver's array differs
    in size or dtype from the sender's, the receiver raises ``CollectiveMismatchError``, which names
    both; the message is lost and the group stays usable.
    """

    def send(
        self,
        tensor: Any,
        dst: int | None = None,
        tag: int = 0,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> None:
        """Send ``tensor`` to one member; return when ``tensor`` may be changed.

        Args:
            tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. The receiver's array has the same size and dtype.
            dst: The global rank of the destination.
            tag: An integer from 0 to 2**32 - 1, equal at both ends. Messages with the same tag
                arrive in order.
            group_dst: The destination's rank in the group, instead of ``dst``.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent, and the group stays
                usable.
            CollectiveTimeoutError: Past the deadline; names the other end. It breaks the group.
            RankFailedError: If the other end dies or leaves.
        """
        if (
            make_fast(self, _SEND, ARRAYS, (tensor, dst, tag, group_dst), timeout)
            is not NotImplemented
        ):
            return
        spec = prepare_send(self, tensor, dst, tag, group_dst)
        if spec is not None:
            self._call_queue.issue(spec, False, timeout)

    def isend(
        self,
        tensor: Any,
        dst: int | None = None,
        tag: int = 0,
        group_dst: int | None = None,
        timeout: Timeout | None = None,
    ) -> Work[None]:
        """Begin to send ``tensor`` to one member.

        Args:
            tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. The receiver's array has the same size and dtype. It must
                not change until the ``Work`` is done.
            dst: The global rank of the destination.
            tag: An integer from 0 to 2**32 - 1, equal at both ends. Messages with the same tag
                arrive in order.
            group_dst: The destination's rank in the group, instead of ``dst``.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            A ``Work``, whose ``wait()`` raises the errors of the call; None on a rank outside the
            group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent, and the group stays
                usable.
        """
        spec = prepare_send(self, tensor, dst, tag, group_dst)
        return NO_MEMBER if spec is None else self._call_queue.issue(spec, True, timeout)

    def recv(
        self,
        tensor: Any,
        src: int | None = None,
        tag: int = 0,
        group_src: int | None = None,
        timeout: Timeout | None = None,
    ) -> int:
        """Receive a message from one member into ``tensor``.

        Args:
            tensor: A NumPy or CuPy array or a buffer, of any shape; a numeric dtype, bool, or one
                of ml_dtypes' floats. The sender's array has the same size and dtype. A read-only
                array (JAX) raises TypeError: use ``irecv(...).result()``.
            src: The global rank of the source; any member if neither ``src`` nor ``group_src`` is
                given.
            tag: An integer from 0 to 2**32 - 1, equal at both ends. Messages with the same tag
                arrive in order.
            group_src: The source's rank in the group, instead of ``src``.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            The sender's global rank; -1 on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent, and the group stays
                usable.
            CollectiveMismatchError: If the sent array has a different size or dtype; the message is
                lost and the group stays usable.
            CollectiveTimeoutError: Past the deadline; the group stays usable.
            RankFailedError: If the other end dies or leaves.
        """
        sender = make_fast(self, _RECV, ARRAYS, (tensor, src, tag, group_src), timeout)
        if sender is not NotImplemented:
            return sender
        spec = prepare_receive(self, tensor, src, tag, group_src, in_place=True)
        return -1 if spec is None else self._call_queue.issue(spec, False, timeout).source

    def irecv(
        self,
        tensor: A,
        src: int | None = None,
        tag: int = 0,
        group_src: int | None = None,
        timeout: Timeout | None = None,
    ) -> Work[A]:
        """Begin to receive a message from one member into ``tensor``.

        Args:
            tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
                one of ml_dtypes' floats. The sender's array has the same size and dtype. It must
                not be used until the ``Work`` is done.
            src: The global rank of the source; any member if neither ``src`` nor ``group_src`` is
                given.
            tag: An integer from 0 to 2**32 - 1, equal at both ends. Messages with the same tag
                arrive in order.
            group_src: The source's rank in the group, instead of ``src``.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            A ``Work``. Its ``result()`` is the array, or a new one if ``tensor`` is read-only
            (JAX). Its ``source_rank()`` is the sender, and its ``wait()`` raises the errors of the
            call. None on a rank outside the group.

        Raises:
            TypeError, ValueError: For invalid arguments; nothing was sent, and the group stays
                usable.
        """
        spec = prepare_receive(self, tensor, src, tag, group_src)
        return NO_MEMBER if spec is None else self._call_queue.issue(spec, True, timeout)


def prepare_send(
    group: GroupOfRanks, tensor: Any, dst: int | None, tag: int, group_dst: int | None
) -> CallSpec | None:
    """Check the arguments of ``send``; return the call, or None on a rank outside the group."""
    if call_queue_of(group).rank < 0:
        return None
    peer = resolve_rank(group, dst, group_dst, "dst")
    check_tag(tag)
    x = arrays.source(tensor, "tensor")
    flat, code = x.flat, check_dtype(x, "tensor")

    def run(communicator: Communicator, call: Call) -> None:
        communicator.send(call, flat, peer, tag)

    return CallSpec(_SEND, run, flat.size, NO_ROOT, code, 0, tag, flat.nbytes, x.device, peer)


def prepare_receive(
    group: GroupOfRanks,
    tensor: Any,
    src: int | None,
    tag: int,
    group_src: int | None,
    *,
    in_place: bool = False,
    put: Callable[[Any], object] | None = None,
) -> CallSpec | None:
    """Check the arguments of ``recv``; return the call, or None on a rank outside the group.

    ``in_place``: ``tensor`` must be writable, because the caller gets no array back. If ``tensor``
    is read-only, ``put`` is called with the array that replaces it.
    """
    call_queue = call_queue_of(group)
    if call_queue.rank < 0:
        return None
    from_any = src is None and group_src is None
    peer = None if from_any else resolve_rank(group, src, group_src, "src")
    check_tag(tag)
    if in_place:
        x = arrays.in_place(tensor, "tensor", "array = irecv(...).result()")
    else:
        x = arrays.target(tensor, "tensor")
    if put is not None:
        x.put_back(put)
    flat, code = x.flat, check_dtype(x, "tensor")

    def run(communicator: Communicator, call: Call) -> ReceivedMessage:
        source = communicator.recv(call, flat, peer, tag)
        return ReceivedMessage(x.finish(), call_queue.ranks[source])

    sender = ANY_SOURCE if peer is None else peer
    return CallSpec(_RECV, run, flat.size, NO_ROOT, code, 0, tag, flat.nbytes, x.device, sender)


def check_tag(tag: int) -> None:
    """Raise ValueError for a tag out of range, TypeError for a value that is not an integer."""
    if not 0 <= (tag if type(tag) is int else to_whole_number(tag, "tag")) <= MAX_TAG:
        raise ValueError(f"tag is {tag}; expected 0 to {MAX_TAG}")
