"""Carriers: what a call takes along beside its arguments, and brings back beside its value.

The one place where something that concerns calls as a whole (a context of gradients, an identity,
a span of a tracer) goes with each of them without the program's doing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

Back = Callable[[], Any]
"""Called in the callee's thread once the function has returned, with its result on the way: returns
what goes back, which is pickled; None: nothing.
"""


class Carrier(Protocol):
    """Registered by ``add_carrier`` on every worker, under the same name."""

    def send(self, to: int) -> Any:
        """Return what a call to the worker of rank ``to`` takes along, None: nothing.

        Called in the thread that makes the call, before its arguments are pickled.
        """
        ...

    def serve(self, sent: Any, caller: int) -> AbstractContextManager[Back]:
        """Return the block in which the function of a call that took ``sent`` along runs, by the
        worker of rank ``caller``. Its value is what tells what goes back.
        """
        ...

    def receive(self, sent: Any, back: Any, callee: int) -> None:
        """Take what came ``back`` from a call that took ``sent`` along.

        Called before the call's future is done, in the thread that reads the reply: it must
        neither wait nor raise.
        """
        ...


class Carriers:
    """The carriers of one worker, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Carrier] = {}

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def add(self, name: str, carrier: Carrier) -> None:
        """Have every call take along what ``carrier`` sends. Raises ValueError for a name twice."""
        if name in self._by_name:
            raise ValueError(f"there is a carrier {name!r} already")
        self._by_name[name] = carrier

    def send(self, to: int) -> dict[str, Any] | None:
        """Return what a call takes along, by carrier."""
        sent = {
            name: it
            for name, carrier in self._by_name.items()
            if (it := carrier.send(to)) is not None
        }
        return sent or None

    def serve(self, sent: dict[str, Any], caller: int, stack: ExitStack) -> dict[str, Back]:
        """Enter the blocks of a call's carriers. Raises KeyError for one that is not here."""
        return {
            name: stack.enter_context(self._by_name[name].serve(it, caller))
            for name, it in sent.items()
        }

    def receive(self, sent: dict[str, Any], back: dict[str, Any], callee: int) -> None:
        """Give each carrier what came back."""
        for name, it in back.items():
            if name in self._by_name:
                self._by_name[name].receive(sent.get(name), it, callee)
