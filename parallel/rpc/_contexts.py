"""Autograd contexts, and what each worker keeps of them: they go with the calls made in them."""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from meshlib import DistError, rpc
from parallel.nn._module import Module
from parallel.rpc._graph import BackwardPass, Edge, Node, PassKey

_RANK_BITS = 48
_REMEMBERED = 1 << 16


class Context:
    """One worker's part of an autograd context. Thread-safe."""

    def __init__(self, id: int, rank: int, numbers: Iterator[int]) -> None:
        self.id: int = id
        self.lock: threading.Lock = threading.Lock()
        self.known: set[int] = set()
        """The workers that this one has brought it to."""
        self.gradients: dict[Any, Any] = {}
        self.passes: dict[PassKey, BackwardPass] = {}
        self.outstanding: dict[Node, None] = {}
        """Forward passes of modules that wait for their backward pass."""
        self.ended: bool = False
        self._rank = rank
        self._numbers = numbers
        self._sent: dict[int, Edge] = {}
        self._leaves: dict[object, Node] = {}

    def send(self, edge: Edge, to: int) -> tuple[int, int]:
        """Note that a value is sent to a worker; return this worker and the number it goes under.

        Raises RuntimeError where the context has ended.
        """
        self.bring_to(to)
        with self.lock:
            number = next(self._numbers)
            self._sent[number] = edge
        return self._rank, number

    def bring_to(self, rank: int) -> None:
        """Note that a worker gets to know the context.

        Raises RuntimeError where the context has ended.
        """
        # In this order: who ends the context either finds the worker, or has been noticed here.
        self.known.add(rank)
        self.check()

    def sent(self, number: int) -> Edge:
        """Return the values sent under a number. Raises RuntimeError if the context has ended."""
        found = self._sent.get(number)
        if found is None:
            raise RuntimeError(_ended(self.id))
        return found

    def pass_of(self, key: PassKey) -> BackwardPass:
        """Return a backward pass. Raises RuntimeError where the context has ended."""
        found = self.passes.get(key)
        if found is None:
            raise RuntimeError(_ended(self.id))
        return found

    def leaf(self, parameter: object, make: Callable[[], Node]) -> Node:
        """Return the node in which a parameter's gradients end: ``make()``, at its first use."""
        with self.lock:
            found = self._leaves.get(parameter)
            if found is None:
                found = self._leaves[parameter] = make()
            return found

    def add_gradient(self, parameter: Any, grad: Any) -> None:
        """Add to the gradient of ``parameter``, which takes the arrays over."""
        with self.lock:
            before = self.gradients.get(parameter)
            self.gradients[parameter] = grad if before is None else _sum(before, grad)

    def check(self) -> None:
        """Raise RuntimeError where the context has ended."""
        if self.ended:
            raise RuntimeError(_ended(self.id))

    def end(self, wait: bool) -> bool:
        """Give up what is recorded; False if something is left, that has to be waited for."""
        self.ended = True
        with self.lock:
            self.gradients.clear()
            self.passes.clear()
            self._sent.clear()
            self._leaves.clear()
            outstanding = list(self.outstanding)
        for one in outstanding:
            if one.discard(wait):
                self.outstanding.pop(one, None)
        return not self.outstanding


class _ThreadContext(threading.local):
    """The calling thread's context."""

    context: Context | None = None
    token: Any = None
    """In a function that JAX differentiates for ``forward``: what all calls are to depend on."""


class ContextStore:
    """One worker's contexts; the carrier that goes with its calls."""

    def __init__(self) -> None:
        self.rank: int = rpc.get_worker_info().id
        self.here: _ThreadContext = _ThreadContext()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        """Of contexts, of passes, and of what is sent."""
        self._contexts: dict[int, Context] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._lost: set[int] = set()
        self._left: list[Context] = []
        """Contexts that have ended, and of which something is left to discard."""
        self._module_locks: weakref.WeakKeyDictionary[Module, threading.Lock] = (
            weakref.WeakKeyDictionary()
        )

    def __len__(self) -> int:
        return len(self._contexts)

    # ------------------------------------------------------------------ contexts

    def next_pass(self) -> PassKey:
        """Return a key for a backward pass that begins here."""
        return self.rank, next(self._numbers)

    def begin(self) -> Context:
        """Make a context."""
        return self.enter(self.rank << _RANK_BITS | next(self._numbers))

    def enter(self, id: int) -> Context:
        """Return a context, made at its first call here. Raises RuntimeError if it has ended."""
        if self._left:
            # Without a wait: a module that is in use may be waiting for this very call.
            with self._lock:
                left, self._left = self._left, []
            self._keep(context for context in left if not context.end(wait=False))
        with self._lock:
            context = self._contexts.get(id)
            if context is None:
                if id in self._ended or id >> _RANK_BITS in self._lost:
                    raise RuntimeError(_ended(id))
                context = self._contexts[id] = Context(id, self.rank, self._numbers)
        return context

    def find(self, id: int) -> Context:
        """Return a context. Raises ValueError for one that is not on this worker."""
        context = self._contexts.get(id)
        if context is None:
            why = "it has ended" if id in self._ended else "no call of it came here"
            raise ValueError(f"context_id is {id}, and this worker has no such context: {why}")
        return context

    def release(self, id: int, informed: frozenset[int]) -> None:
        """End a context here, and on all workers that it was brought to, except for the
        ``informed`` ones."""
        with self._lock:
            context = self._contexts.pop(id, None)
            self._ended[id] = None
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        if context is None:
            return
        context.end(wait=True)
        others = context.known - informed - {self.rank}
        informed = informed | others | {self.rank}
        for rank in others:
            self._send_release(rank, id, informed)

    def _send_release(self, rank: int, id: int, informed: frozenset[int]) -> None:
        """Have a worker end a context, or all if that fails: only it knew its own callees."""

        def note(done: rpc.Future[Any]) -> None:
            if done.exception() is not None:
                self._release_everywhere(id, informed - {rank})

        try:
            rpc.rpc_async(rank, _release, (id, informed)).add_done_callback(note)
        except (DistError, RuntimeError):
            self._release_everywhere(id, informed)

    def _release_everywhere(self, id: int, informed: frozenset[int]) -> None:
        with suppress(RuntimeError):  # RPC has ended
            everyone = frozenset(worker.id for worker in rpc.get_worker_infos())
            for rank in everyone - informed:
                with suppress(DistError):
                    rpc.rpc_async(rank, _release, (id, everyone))

    @contextmanager
    def within(self, context: Context | None, token: Any = None) -> Generator[None]:
        """Put the calling thread in ``context``; see ``_ThreadContext``."""
        here = self.here
        before = here.context, here.token
        here.context, here.token = context, token
        try:
            yield
        finally:
            here.context, here.token = before

    def lock_of(self, module: Module) -> threading.Lock:
        """Return the lock that guards the use of ``module``."""
        with self._lock:
            return self._module_locks.setdefault(module, threading.Lock())

    # ------------------------------------------------------------------ what calls ask it

    def send(self, to: int) -> Any:
        """Return the thread's context in the form in which a call carries it."""
        context = self.here.context
        if context is None:
            return None
        context.bring_to(to)
        return _Ticket(context.id)

    @contextmanager
    def serve(self, sent: int, caller: int) -> Generator[Callable[[], Any]]:
        """Run a call's function in its context."""
        del caller
        with self.within(self.enter(sent)):
            yield lambda: None

    @contextmanager
    def answering(self, sent: int) -> Generator[None]:
        """Pickle a call's result in its context, if that has not ended."""
        with self.within(self._contexts.get(sent)):
            yield

    def receive(self, sent: Any, back: Any, callee: int) -> None:
        """Nothing comes back."""

    def current(self) -> int | None:
        """Return the id of the thread's context."""
        return None if self.here.context is None else self.here.context.id

    def lose(self, rank: int) -> None:
        """End the contexts of a worker that is gone."""
        with self._lock:
            if rank in self._lost:
                return
            self._lost.add(rank)
            gone = [id for id in self._contexts if id >> _RANK_BITS == rank]
            contexts = [self._contexts.pop(id) for id in gone]
        self._keep(context for context in contexts if not context.end(wait=False))

    def _keep(self, left: Iterable[Context]) -> None:
        kept = list(left)
        with self._lock:
            self._left += kept


class _Ticket:
    """A context's id on its way with a call: where it comes, the worker keeps contexts."""

    def __init__(self, id: int) -> None:
        self._id = id

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._id,)


def _arrive(id: int) -> int:
    keeper()
    return id


def keeper() -> ContextStore:
    """Return this worker's table of contexts. Raises RuntimeError if there is no RPC."""
    return cast(ContextStore, rpc.differentiate())


def _release(id: int, informed: frozenset[int]) -> None:
    with keeper().within(None):
        keeper().release(id, informed)


def _ended(id: int) -> str:
    return f"the autograd context {id} has ended: a call, or a value of it, came after its end"


def _sum(a: Any, b: Any) -> Any:
    if hasattr(a, "dtype"):
        return a + b
    import jax

    return jax.tree.map(operator.add, a, b)
