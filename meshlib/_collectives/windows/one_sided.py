"""``window``: creates the one-sided windows of a group."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshlib._calls.spec import CallSpec
from meshlib._collectives.group_of_ranks import GroupOfRanks
from meshlib._collectives.windows.layout import WindowLayout, on_cpu
from meshlib._collectives.windows.window import Window
from transport._calls.call import Call
from transport._calls.codes import dtype_code, dtype_name
from transport._calls.header import Kind
from transport._communicators.base import Communicator
from transport._operands.reduce_op import Flat
from transport._waiting.deadline import Timeout
from transport._windows.memory import MappedMemory, Target
from transport._windows.service import RemoteMemory, WindowService


class OneSided(GroupOfRanks):
    """One-sided access to the memory of other members."""

    def window(self, array: Any, timeout: Timeout | None = None) -> Window:
        """Return a window: one array per member, which all members can read and change directly.

        Every member calls, each with its own CPU array. Sizes may differ, the dtype may not. The
        window copies ``array`` into its own memory, ``Window.array``. Members on the same host map
        that memory; others send messages, which a thread of the owner executes.

        Args:
            array: The initial contents of this member's array. The size may be 0.
            timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

        Returns:
            The window; None on a rank outside the group. ``close`` it, or use ``with``.

        Raises:
            TypeError, ValueError: For a value that is not a CPU array, and on all members if their
                dtypes differ.
            CollectiveMismatchError, CollectiveTimeoutError, RankFailedError: As for collectives.
        """
        queue = self._call_queue
        if queue.rank < 0:
            return None  # type: ignore[return-value]
        flat, shape, code = queue.checked(Kind.WINDOW, _check, array)
        rank, size = queue.rank, len(queue.ranks)

        def run(communicator: Communicator, call: Call) -> Window | list[int]:
            mine = np.array([code, flat.size], np.int64)
            given = np.empty((size, 2), np.int64)
            communicator.all_gather(call, list(given), mine)
            codes, counts = given.T.tolist()
            if set(codes) != {code}:
                return codes
            layout = WindowLayout(queue.ranks, flat.dtype, counts)
            shared = communicator.share(call, [layout.nbytes(i) for i in range(size)])
            mapped = {i: MappedMemory(data) for i, data in enumerate(shared) if data is not None}
            own, number = mapped[rank], call.header.sequence
            array = own.data[layout.begin :].view(flat.dtype)
            array[:] = flat
            targets: list[Target] = [*mapped.values()]
            if len(mapped) < size:
                service = queue.state.windows or WindowService(communicator.membership)
                assert isinstance(service, WindowService)
                queue.state.windows = service
                service.serve(number, own)
                targets = [mapped.get(i) or RemoteMemory(service, i, number) for i in range(size)]
            communicator.barrier(call)
            return Window(self, number, array.reshape(shape), layout, targets)

        result = queue.issue(CallSpec(Kind.WINDOW, run, nbytes=flat.nbytes), timeout=timeout)
        if isinstance(result, Window):
            return result
        rows = "".join(
            f"\n  rank {r}: {dtype_name(c)}" for r, c in zip(queue.ranks, result, strict=True)
        )
        raise ValueError(f"the members of {queue} pass arrays of different dtypes:{rows}")


def _check(array: Any) -> tuple[Flat, tuple[int, ...], int]:
    flat = on_cpu(array, "array")
    return flat, np.shape(array), dtype_code(flat.dtype)
