"""One compiled program: what its calls of Python share, and for whom it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import methodcaller
from typing import Any, Protocol

import jax
import numpy.typing as npt

from meshlib.groups.process_group import ProcessGroup

HostArray = npt.NDArray[Any]
HostFunction = Callable[[Sequence[HostArray], Sequence[HostArray], "Program"], None]
"""``function(outputs, inputs, program)``: writes ``outputs`` in place. ``inputs`` must not be
changed, except those whose memory is an output's (see ``aliases``)."""

# NumPy's ``asarray`` asks for three other protocols first, which takes three times as long.
_as_array = methodcaller("__array__")

Views = Callable[[Any, Sequence[Any]], AbstractContextManager[list[HostArray]]]
"""``views(context, buffers)`` gives arrays over what XLA passes, while the call is made.

None stands for NumPy's own, for which nothing has to be prepared.
"""


class Owner(Protocol):
    """For whom a program runs. Equal ones may run it at once."""

    @property
    def patience(self) -> float:
        """Seconds that it waits until the program does not run for another one."""
        ...

    def waiting(self) -> AbstractContextManager[object]:
        """Return the block in which the thread waits: for the program, or for its end."""
        ...


class Program:
    """Stands for one compiled program: the same object for all calls in it."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks
        self._guards: list[Callable[[BaseException], None]] = []
        self._groups: dict[ProcessGroup, None] = {}
        self._changed = threading.Condition()
        self._runs = 0
        self._errors: list[BaseException] = []
        self.find_owner: Callable[[], Owner] | None = None
        self.owner: Any = None
        """For whom it runs, where its calls ask (see ``host_call``)."""

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
            owner = group.owner
            if owner is me:
                continue
            if owner is not None and owner.is_alive():
                raise RuntimeError(
                    f"thread {me.name!r} runs a program with calls on {group}, and so has thread"
                    f" {owner.name!r}. Calls inside jax.jit are in order within a thread only: with"
                    " two of them ranks could make the calls in different orders. Give each thread"
                    " a group of its own, such as dist.new_group(ranks)"
                )
            group.owner = me

    @property
    def is_ours(self) -> bool:
        """Whether the program calls no Python but through ``host_call``.

        Then only such a call can end it before its end, and ``guard`` sees every one of them.
        """
        return all(isinstance(callback, Callback) for callback in self._callbacks)

    def guard(self, cleanup: Callable[[BaseException], None]) -> None:
        """Have ``cleanup(error)`` called before a call that raised ``error`` ends the program.

        XLA then frees the program's buffers: whoever still works on them has to stop first.
        """
        self._guards.append(cleanup)

    def unguard(self, cleanup: Callable[[BaseException], None]) -> None:
        """End what ``guard`` began; nothing if it has ended."""
        if cleanup in self._guards:
            self._guards.remove(cleanup)

    def fail(self, error: BaseException) -> None:
        """Call all guards."""
        for cleanup in list(self._guards):
            cleanup(error)
        if self.find_owner is not None:
            self._errors.append(error)

    def run(self, execute: Callable[[], Any], settle: Callable[[], None]) -> Any:
        """Return ``execute()``, which runs the program, for the owner that the thread finds.

        ``settle()`` waits for the end of a failed one.

        Raises what a call in the program raised, and RuntimeError where the program runs for
        another one for longer than the owner's patience.
        """
        assert self.find_owner is not None
        owner = self.find_owner()
        with self._entered(owner):
            try:
                result = execute()
                with owner.waiting():
                    jax.effects_barrier()
                return result
            except jax.errors.JaxRuntimeError as failure:
                with owner.waiting():
                    settle()
                error = self._raised(str(failure))
                if error is None:
                    raise
        try:
            raise error
        finally:
            del error  # which has this frame, and with it the results, in its traceback

    @contextmanager
    def _entered(self, owner: Owner) -> Generator[None]:
        def is_free() -> bool:
            return not self._runs or self.owner == owner

        with self._changed:
            if not is_free():
                with owner.waiting():
                    if not self._changed.wait_for(is_free, owner.patience):
                        raise RuntimeError(
                            f"a program with remote calls has run for {self.owner} for"
                            f" {owner.patience:g} s, and is to run for {owner}; it runs for one at"
                            " a time"
                        )
            if not self._runs:
                self.owner = owner
            self._runs += 1
        try:
            yield
        finally:
            with self._changed:
                self._runs -= 1
                if not self._runs:
                    self.owner = None
                    self._errors.clear()  # and what their tracebacks hold
                self._changed.notify_all()

    @property
    def runs(self) -> int:
        """How often it runs at this moment, for its owner."""
        return self._runs

    def _raised(self, text: str) -> BaseException | None:
        """Return what a call raised, of which XLA says ``text``."""
        for error in reversed(self._errors):
            if type(error).__name__ in text and str(error)[:200] in text:
                return error
        return None


class Callback:
    """What XLA calls: hands the function views of the program's buffers, NumPy's or CuPy's."""

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
        except BaseException as error:
            self.program.fail(error)
            raise
        return ()
