"""One compiled program: the state that its calls share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import methodcaller
from typing import Any

import numpy.typing as npt

from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._groups.process_group import ProcessGroup

HostArray = npt.NDArray[Any]
HostFunction = Callable[[Sequence[HostArray], Sequence[HostArray], "Program"], None]
"""``function(outputs, inputs, program)`` writes ``outputs`` in place. It must not change
``inputs``, except those that share memory with an output (see ``aliases``)."""

# NumPy's ``asarray`` tries three other protocols first, which is slow.
_as_array = methodcaller("__array__")

Views = Callable[[Any, Sequence[Any]], AbstractContextManager[list[HostArray]]]
"""``views(context, buffers)`` yields arrays over XLA's buffers for the time of the call.

In its place, None stands for NumPy arrays, which need no preparation.
"""


class StateInJit:
    """The state of a group inside ``jax.jit``."""

    def __init__(self) -> None:
        self.owner: threading.Thread | None = None
        """The thread that runs the group's programs: calls are ordered only within a thread."""
        self.calls: Any = None
        """``ProgramCalls``, for calls without the interpreter; None before the first call."""
        self.under_way: dict[int, Any] = {}
        """The started calls by tag; a later call of the program completes them."""

    def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` for a running call, then leave all calls to Python."""
        if self.calls is not None:
            self.calls.close(seconds)


def state_in_jit(group: ProcessGroup) -> StateInJit:
    """Return the state of ``group`` inside ``jax.jit``."""
    state = call_queue_of(group).state
    if state.in_jit is None:
        state.in_jit = StateInJit()
    return state.in_jit


class Program:
    """The state of one compiled program, shared by all of its calls."""

    def __init__(self) -> None:
        self._guards: list[Callable[[BaseException], None]] = []
        self._groups: dict[ProcessGroup, None] = {}
        self.last: object = None
        """A result of the last run. All calls have ended when it is ready."""

    def add_group(self, group: ProcessGroup) -> None:
        """Record that the program makes calls on ``group``."""
        self._groups[group] = None

    def enter(self) -> None:
        """Make the calling thread, which is about to run the program, the owner of its groups.

        Raises RuntimeError when another live thread owns one of the groups.
        """
        me = threading.current_thread()
        for group in self._groups:
            state = state_in_jit(group)
            owner = state.owner
            if owner is me:
                continue
            if owner is not None and owner.is_alive():
                raise RuntimeError(
                    f"thread {me.name!r} runs a program with calls on {group}, and so has thread"
                    f" {owner.name!r}. Calls inside jax.jit are in order within a thread only: with"
                    " two of them ranks could make the calls in different orders. Give each thread"
                    " a group of its own, such as dist.new_group(ranks)"
                )
            state.owner = me

    def guard(self, cleanup: Callable[[BaseException], None]) -> None:
        """Register ``cleanup(error)``, to run before ``error`` in a call ends the program.

        XLA then frees the program's buffers. A program that ends in another way, such as by an
        error in the user's own callback, runs no cleanup.
        """
        self._guards.append(cleanup)

    def unguard(self, cleanup: Callable[[BaseException], None]) -> None:
        """Remove a cleanup that ``guard`` registered. Do nothing if it was removed before."""
        if cleanup in self._guards:
            self._guards.remove(cleanup)

    def fail(self, error: BaseException) -> None:
        """Run all registered cleanups."""
        for cleanup in list(self._guards):
            cleanup(error)


class Callback:
    """The callback that XLA calls: it passes NumPy or CuPy views of the buffers to a function."""

    def __init__(
        self,
        function: HostFunction,
        program: Program,
        tokens: int,
        operands: int,
        views: Views | None,
        reads: bool = True,
    ) -> None:
        self.program = program
        self._function = function
        self._views = views
        # The buffers that XLA passes: a token, the operands, a token, the results.
        self._inputs = slice(tokens, tokens + operands) if reads else None
        self._outputs = slice(tokens + operands + tokens, None)

    def __call__(self, context: Any, *buffers: Any) -> tuple[()]:
        outputs = buffers[self._outputs]
        inputs = buffers[self._inputs] if self._inputs is not None else ()
        try:
            if self._views is None:
                read = [*map(_as_array, inputs)] if inputs else ()
                self._function([*map(_as_array, outputs)], read, self.program)
            else:
                with self._views(context, (*outputs, *inputs)) as views:
                    self._function(views[: len(outputs)], views[len(outputs) :], self.program)
        except BaseException as error:  # any error ends the program
            self.program.fail(error)
            raise
        return ()
