"""One compiled program: what its calls of Python share."""

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
"""``function(outputs, inputs, program)``: writes ``outputs`` in place. ``inputs`` must not be
changed, except those whose memory is an output's (see ``aliases``)."""

# NumPy's ``asarray`` asks for three other protocols first, which takes three times as long.
_as_array = methodcaller("__array__")

Views = Callable[[Any, Sequence[Any]], AbstractContextManager[list[HostArray]]]
"""``views(context, buffers)`` gives arrays over XLA's buffers, while the call is made.

None stands for NumPy's own, for which nothing has to be prepared.
"""


class StateInJit:
    """The state of a group inside ``jax.jit``."""

    def __init__(self) -> None:
        self.owner: threading.Thread | None = None
        """The thread that makes these calls: calls are ordered within a thread only."""
        self.calls: Any = None
        """``ProgramCalls``, which make its calls without the interpreter; None before the first."""
        self.under_way: dict[int, Any] = {}
        """By tag: calls begun by one place of a program, which end at another."""

    def close(self, seconds: float) -> None:
        """Let a call that is under way end, at most ``seconds``; then leave all calls to Python."""
        if self.calls is not None:
            self.calls.close(seconds)


def state_in_jit(group: ProcessGroup) -> StateInJit:
    """Return the state of ``group`` inside ``jax.jit``."""
    state = call_queue_of(group).state
    if state.in_jit is None:
        state.in_jit = StateInJit()
    return state.in_jit


class Program:
    """Stands for one compiled program: the same object for all calls in it."""

    def __init__(self) -> None:
        self._guards: list[Callable[[BaseException], None]] = []
        self._groups: dict[ProcessGroup, None] = {}
        self.last: object = None
        """A result of the last run. All calls have ended when it is ready."""

    def add_group(self, group: ProcessGroup) -> None:
        """Note that the program makes calls on ``group``."""
        self._groups[group] = None

    def enter(self) -> None:
        """Make its groups this thread's, which is about to run the program.

        Raises RuntimeError when another thread that is still there has run programs with calls on
        one of them.
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
        """Have ``cleanup(error)`` called before a call that raised ``error`` ends the program.

        XLA then frees the program's buffers. A program that ends in another way, such as by an
        error of the user's own callback, calls no cleanup.
        """
        self._guards.append(cleanup)

    def unguard(self, cleanup: Callable[[BaseException], None]) -> None:
        """End the guard begun by ``guard``. Does nothing if it has ended."""
        if cleanup in self._guards:
            self._guards.remove(cleanup)

    def fail(self, error: BaseException) -> None:
        """Call all guards."""
        for cleanup in list(self._guards):
            cleanup(error)


class Callback:
    """XLA's callback: hands the function views of the program's buffers, NumPy's or CuPy's."""

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
        except BaseException as error:  # the program says why, whatever it was
            self.program.fail(error)
            raise
        return ()
