"""Autograd contexts, which propagate with remote calls, and each worker's store of contexts."""

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
_MAX_ENDED = 1 << 16


class Context:
    """One worker's part of an autograd context. Thread-safe."""

    def __init__(self, id: int, rank: int, numbers: Iterator[int]) -> None:
        self.id: int = id
        self.lock: threading.Lock = threading.Lock()
        self.known: set[int] = set()
        """The workers to which this worker has propagated the context."""
        self.gradients: dict[Any, Any] = {}
        self.passes: dict[PassKey, BackwardPass] = {}
        self.outstanding: dict[Node, None] = {}
        """Forward passes of modules that wait for their backward."""
        self.ended: bool = False
        self._rank = rank
        self._numbers = numbers
        self._sent: dict[int, Edge] = {}
        self._leaves: dict[object, Node] = {}

    def send(self, edge: Edge, to: int) -> tuple[int, int]:
        """Record that a value is sent to a worker; return this worker and the value's number.

        Raises RuntimeError if the context has ended.
        """
        self.bring_to(to)
        with self.lock:
            number = next(self._numbers)
            self._sent[number] = edge
        return self._rank, number

    def bring_to(self, rank: int) -> None:
        """Record that the context propagates to a worker.

        Raises RuntimeError if the context has ended.
        """
        # In this order, a concurrent end either sees the worker in ``known`` or is detected here.
        self.known.add(rank)
        self.check()

    def sent(self, number: int) -> Edge:
        """Return the edge of a sent value. Raises RuntimeError if the context has ended."""
        found = self._sent.get(number)
        if found is None:
            raise RuntimeError(_ended(self.id))
        return found

    def pass_of(self, key: PassKey) -> BackwardPass:
        """Return a backward pass. Raises RuntimeError if the context has ended."""
        found = self.passes.get(key)
        if found is None:
            raise RuntimeError(_ended(self.id))
        return found

    def leaf(self, parameter: object, make: Callable[[], Node]) -> Node:
        """Return the leaf node of a parameter, made by ``make()`` at its first use."""
        with self.lock:
            found = self._leaves.get(parameter)
            if found is None:
                found = self._leaves[parameter] = make()
            return found

    def add_gradient(self, parameter: Any, grad: Any) -> None:
        """Add to the gradient of ``parameter``. The context may keep the arrays of ``grad``."""
        with self.lock:
            before = self.gradients.get(parameter)
            self.gradients[parameter] = grad if before is None else _sum(before, grad)

    def check(self) -> None:
        """Raise RuntimeError if the context has ended."""
        if self.ended:
            raise RuntimeError(_ended(self.id))

    def end(self, wait: bool) -> bool:
        """Drop the recorded graph. Returns False if modules in use remain, unless ``wait``."""
        self.ended = True
        with self.lock:
            self.gradients.clear()
            self.passes.clear()
            self._sent.clear()
            self._leaves.clear()
            outstanding = list(self.outstanding)
        for node in outstanding:
            if node.discard(wait):
                self.outstanding.pop(node, None)
        return not self.outstanding


class _ThreadContext(threading.local):
    """The calling thread's context."""

    context: Context | None = None
    token: Any = None
    """In a function that JAX differentiates for ``forward``: a value on which all calls depend."""


class ContextStore:
    """One worker's contexts, and the carrier that propagates them with its calls."""

    def __init__(self) -> None:
        self.rank: int = rpc.get_worker_info().id
        self.thread: _ThreadContext = _ThreadContext()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        """The numbers of contexts, passes and sent values."""
        self._contexts: dict[int, Context] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._lost: set[int] = set()
        self._to_discard: list[Context] = []
        """Ended contexts with outstanding forward passes of modules that were in use."""
        self._module_locks: weakref.WeakKeyDictionary[Module, threading.Lock] = (
            weakref.WeakKeyDictionary()
        )

    def __len__(self) -> int:
        return len(self._contexts)

    # ------------------------------------------------------------------ contexts

    def next_pass(self) -> PassKey:
        """Return the key of a new backward pass."""
        return self.rank, next(self._numbers)

    def begin(self) -> Context:
        """Make a context."""
        return self.enter(self.rank << _RANK_BITS | next(self._numbers))

    def enter(self, id: int) -> Context:
        """Return a context, made at its first call on this worker.

        Raises RuntimeError if it has ended.
        """
        if self._to_discard:
            # Without waiting, because a module in use may wait for the current call.
            with self._lock:
                ended, self._to_discard = self._to_discard, []
            self._discard_later(context for context in ended if not context.end(wait=False))
        with self._lock:
            context = self._contexts.get(id)
            if context is None:
                if id in self._ended or id >> _RANK_BITS in self._lost:
                    raise RuntimeError(_ended(id))
                context = self._contexts[id] = Context(id, self.rank, self._numbers)
        return context

    def find(self, id: int) -> Context:
        """Return a context. Raises ValueError if it is not on this worker."""
        context = self._contexts.get(id)
        if context is None:
            why = "it has ended" if id in self._ended else "it has made no call to this worker"
            raise ValueError(f"context_id is {id}, but this worker has no such context: {why}")
        return context

    def release(self, id: int, informed: frozenset[int]) -> None:
        """End a context on this worker, and on all that it has propagated to but ``informed``."""
        with self._lock:
            context = self._contexts.pop(id, None)
            self._ended[id] = None
            if len(self._ended) > _MAX_ENDED:
                self._ended.popitem(last=False)
        if context is None:
            return
        context.end(wait=True)
        others = context.known - informed - {self.rank}
        informed = informed | others | {self.rank}
        for rank in others:
            self._send_release(rank, id, informed)

    def _send_release(self, rank: int, id: int, informed: frozenset[int]) -> None:
        """End a context on a worker. If the call fails, end it on all workers.

        Only the called worker knows the workers that it has called itself.
        """

        def on_done(done: rpc.Future[Any]) -> None:
            if done.exception() is not None:
                self._release_everywhere(id, informed - {rank})

        try:
            rpc.rpc_async(rank, _release, (id, informed)).add_done_callback(on_done)
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
        """Return a block in which the calling thread is in ``context``; see ``_ThreadContext``."""
        thread = self.thread
        before = thread.context, thread.token
        thread.context, thread.token = context, token
        try:
            yield
        finally:
            thread.context, thread.token = before

    def lock_of(self, module: Module) -> threading.Lock:
        """Return the lock that guards the use of ``module``."""
        with self._lock:
            return self._module_locks.setdefault(module, threading.Lock())

    # ------------------------------------------------------------------ the carrier of calls

    def send(self, to: int) -> Any:
        """Return the thread's context for a call to a worker, or None."""
        context = self.thread.context
        if context is None:
            return None
        context.bring_to(to)
        return _CarriedId(context.id)

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
        """Do nothing: results carry no context."""

    def current(self) -> int | None:
        """Return the id of the thread's context."""
        return None if self.thread.context is None else self.thread.context.id

    def lose(self, rank: int) -> None:
        """End the contexts of a lost worker."""
        with self._lock:
            if rank in self._lost:
                return
            self._lost.add(rank)
            gone = [id for id in self._contexts if id >> _RANK_BITS == rank]
            contexts = [self._contexts.pop(id) for id in gone]
        self._discard_later(context for context in contexts if not context.end(wait=False))

    def _discard_later(self, contexts: Iterable[Context]) -> None:
        listed = list(contexts)
        with self._lock:
            self._to_discard += listed


class _CarriedId:
    """A context's id in a call. Unpickling it makes the receiving worker's context store."""

    def __init__(self, id: int) -> None:
        self._id = id

    def __reduce__(self) -> tuple[Any, ...]:
        return _received_id, (self._id,)


def _received_id(id: int) -> int:
    context_store()
    return id


def context_store() -> ContextStore:
    """Return this worker's contexts. Raises RuntimeError if RPC is not initialised."""
    return cast(ContextStore, rpc.differentiate())


def _release(id: int, informed: frozenset[int]) -> None:
    with context_store().within(None):
        context_store().release(id, informed)


def _ended(id: int) -> str:
    return f"the autograd context {id} has ended; expected its calls and values before its end"


def _sum(a: Any, b: Any) -> Any:
    if hasattr(a, "dtype"):
        return a + b
    import jax

    return jax.tree.map(operator.add, a, b)
