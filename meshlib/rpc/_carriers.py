"""Carriers: data that accompany a call's arguments to the callee, and its result back.

Carriers attach an autograd context, an identity or a tracer's span to every call without changes
to the program.
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
"""Called in the callee's thread when the function has returned. Returns the value to send back,
which is pickled, or None.
"""


class Carrier(Protocol):
    """A carrier; ``add_carrier`` registers it on every worker, under the same name."""

    def send(self, to: int) -> Any:
        """Return the value to send with a call to the worker of rank ``to``, or None.

        Called in the thread that makes the call, before its arguments are pickled.
        """
        ...

    def serve(self, sent: Any, caller: int) -> AbstractContextManager[Back]:
        """Return the context manager in which the callee runs the function of a call with the value
        ``sent``, from the worker of rank ``caller``. It yields the ``Back`` function.
        """
        ...

    def receive(self, sent: Any, back: Any, callee: int) -> None:
        """Handle the value ``back`` of a call that was sent with ``sent``.

        Called before the call's future is done, in the thread that reads the reply. Must neither
        wait nor raise.
        """
        ...


class Differentiating(Carrier, Protocol):
    """The carrier of gradients, which also handles RRefs and lost workers."""

    def replace(
        self,
        request: PreparedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        creates: bool,
    ) -> Any:
        """Return the call to make in place of ``request(args, kwargs)``, or None to make that.

        The arguments are not pickled yet. With ``creates``, the value remains on the worker. The
        result has ``Future``'s methods, and the ``connection`` of its call.
        """
        ...

    def backward(self, context_id: int, value: object, retain_graph: bool) -> None:
        """Run the backward pass from ``value``, an object of this worker (``RRef.backward``)."""
        ...

    def answering(self, sent: Any) -> AbstractContextManager[None]:
        """Return the context for pickling the result of a call that was sent with ``sent``."""
        ...

    def current(self) -> int | None:
        """Return the calling thread's autograd context id, or None."""
        ...

    def lose(self, rank: int) -> None:
        """Record the loss of the worker ``rank``. Must neither wait nor raise."""
        ...


class Carriers:
    """The carriers of one worker, by name."""

    def __init__(self) -> None:
        # Replaced, never changed, because calls iterate over it.
        self._by_name: dict[str, Carrier] = {}
        self._adding = threading.Lock()
        self.gradients: Differentiating | None = None

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def add(self, name: str, carrier: Carrier) -> None:
        """Add ``carrier`` to every call. Raises ValueError if ``name`` exists."""
        with self._adding:
            if name in self._by_name:
                raise ValueError(f"a carrier {name!r} already exists")
            self._by_name = {**self._by_name, name: carrier}

    def differentiate(self, make: Callable[[], Differentiating]) -> Differentiating:
        """Return the carrier of gradients, created by ``make`` if there is none."""
        with self._adding:
            if self.gradients is None:
                made = make()
                self._by_name = {**self._by_name, GRADIENTS: made}
                self.gradients = made
            return self.gradients

    def send(self, to: int) -> dict[str, Any] | None:
        """Return the values to send with a call, by carrier's name; None: no values."""
        sent = {
            name: it
            for name, carrier in self._by_name.items()
            if (it := carrier.send(to)) is not None
        }
        return sent or None

    def serve(self, sent: dict[str, Any], caller: int, stack: ExitStack) -> dict[str, Back]:
        """Enter the contexts of a call's carriers. Raises KeyError for an unknown carrier."""
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
        """Pass each carrier its value of the reply."""
        for name, it in back.items():
            if name in self._by_name:
                self._by_name[name].receive(sent.get(name), it, callee)
