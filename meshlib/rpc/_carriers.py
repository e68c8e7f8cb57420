"""Carriers: data that travel with a call beside its arguments, and back beside its value.

Through carriers, a context of gradients, an identity or a tracer's span accompanies every call
without the program's help.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

from meshlib.rpc._calling.futures import PreparedCall

GRADIENTS = "gradients"
"""The name of the carrier of gradients."""
Back = Callable[[], Any]
"""Called in the callee's thread once the function has returned, with its result on the way: returns
what goes back, which is pickled; None: nothing.
"""


class Carrier(Protocol):
    """Registered by ``add_carrier`` on every worker, under the same name."""

    def send(self, to: int) -> Any:
        """Return the value that a call to the worker of rank ``to`` carries, or None.

        Called in the thread that makes the call, before its arguments are pickled.
        """
        ...

    def serve(self, sent: Any, caller: int) -> AbstractContextManager[Back]:
        """Return the block in which the function of a call that took ``sent`` along runs, by the
        worker of rank ``caller``. Its value determines what goes back.
        """
        ...

    def receive(self, sent: Any, back: Any, callee: int) -> None:
        """Take the value that came ``back`` from a call that carried ``sent``.

        Called before the call's future is done, in the thread that reads the reply: it must
        neither wait nor raise.
        """
        ...


class Differentiating(Carrier, Protocol):
    """A carrier of gradients, which calls, RRefs and ends of workers also use."""

    def replace(
        self,
        request: PreparedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        creates: bool,
    ) -> Any:
        """Return the call that is made in place of ``request(args, kwargs)``, None: that one.

        The arguments are the program's, not pickled yet; with ``creates``, the value stays on the
        worker. The result has ``Future``'s methods, and the ``connection`` of its call.
        """
        ...

    def backward(self, context_id: int, value: object, retain_graph: bool) -> None:
        """Compute gradients from ``value``, an object of this worker (``RRef.backward``)."""
        ...

    def answering(self, sent: Any) -> AbstractContextManager[None]:
        """Return the context for pickling the result of a call that carried ``sent``."""
        ...

    def current(self) -> int | None:
        """Return the context of the calling thread, None if it has none."""
        ...

    def lose(self, rank: int) -> None:
        """Note that the worker of ``rank`` is gone. Neither waits nor raises."""
        ...


class Carriers:
    """The carriers of one worker, by name."""

    def __init__(self) -> None:
        # Replaced as a whole: calls go through it while a carrier is added.
        self._by_name: dict[str, Carrier] = {}
        self._adding = threading.Lock()
        self.gradients: Differentiating | None = None

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def add(self, name: str, carrier: Carrier) -> None:
        """Let every call carry the values of ``carrier``. Raises ValueError for a name twice."""
        with self._adding:
            if name in self._by_name:
                raise ValueError(f"there is a carrier {name!r} already")
            self._by_name = {**self._by_name, name: carrier}

    def differentiate(self, make: Callable[[], Differentiating]) -> Differentiating:
        """Return the carrier of gradients; add it first, where it is not there yet."""
        with self._adding:
            if self.gradients is None:
                made = make()
                self._by_name = {**self._by_name, GRADIENTS: made}
                self.gradients = made
            return self.gradients

    def send(self, to: int) -> dict[str, Any] | None:
        """Return the values that a call carries, by carrier."""
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

    def answering(self, sent: dict[str, Any] | None) -> AbstractContextManager[None]:
        """Return the context for pickling a call's result."""
        if sent is None or self.gradients is None or GRADIENTS not in sent:
            return nullcontext()
        return self.gradients.answering(sent[GRADIENTS])

    def receive(self, sent: dict[str, Any], back: dict[str, Any], callee: int) -> None:
        """Give each carrier its value that came back."""
        for name, it in back.items():
            if name in self._by_name:
                self._by_name[name].receive(sent.get(name), it, callee)
